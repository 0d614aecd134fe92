"""What a step costs: given, fitted from measured steps, or assumed; and how well it is known."""

import random

import pytest

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.cost_fitting import fit_cost
from hfpaged.planner.cost_model import CostModel, context_of, parse_cost
from hfpaged.planner.trace import TraceStep

TRUE = CostModel(0.012, 3e-5, 2e-4, 4e-8)


def steps(count=300, noise=0.0, seed=0):
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        prefill, decodes = chance.choice([0, 0, chance.randrange(2000)]), chance.randrange(1, 100)
        context = decodes * chance.randrange(100, 3000) + prefill
        seconds = TRUE.seconds(prefill, decodes, context) * (1 + chance.uniform(-noise, noise))
        found.append(TraceStep(prefill, decodes, context, seconds))
    return found


def test_exact_steps_give_back_their_cost_and_nothing_is_left_to_explain():
    fit = fit_cost(steps())
    found = (fit.cost.step, fit.cost.prefill, fit.cost.decode, fit.cost.context)
    assert found == pytest.approx((TRUE.step, TRUE.prefill, TRUE.decode, TRUE.context), rel=1e-6)
    assert fit.r2 == pytest.approx(1)
    assert fit.median_error < 1e-6
    assert (fit.steps, fit.left_out) == (300, 0)


def test_noise_is_told_and_costs_are_near_all_the_same():
    fit = fit_cost(steps(3000, noise=0.2))
    for prefill, decodes, context in ((0, 50, 50_000), (1500, 10, 12_000), (0, 1, 100)):
        assert fit.cost.seconds(prefill, decodes, context) == pytest.approx(
            TRUE.seconds(prefill, decodes, context), rel=0.05
        )
    assert fit.median_error == pytest.approx(0.1, abs=0.02)
    assert 0.8 < fit.r2 < 0.99


def test_steps_that_are_far_off_are_left_out():
    far = [step._replace(seconds=step.seconds * 300) for step in steps(9, seed=1)]
    fit = fit_cost(steps(300, noise=0.05) + far)
    assert fit.left_out == 9
    assert fit.cost.seconds(0, 50, 50_000) == pytest.approx(TRUE.seconds(0, 50, 50_000), rel=0.03)


def test_no_cost_is_below_zero_and_what_cannot_be_told_apart_is_one_of_them():
    falling = [TraceStep(0, 4, context, 0.05 - context * 1e-6) for context in range(1000, 20_000, 500)]
    fit = fit_cost(falling)
    assert min(fit.cost.step, fit.cost.prefill, fit.cost.decode, fit.cost.context) >= 0
    assert fit.cost.seconds(0, 4, 10_000) == pytest.approx(0.04, rel=0.1)


def test_too_few_steps_are_no_fit():
    with pytest.raises(InvalidConfigError, match="3 measured steps are too few"):
        fit_cost(steps(3))


def test_a_cost_is_written_by_its_letters():
    assert parse_cost("a=0.01, d=1e-8") == CostModel(0.01, 0, 0, 1e-8)
    for wrong in ("x=1", "a=fast", "a", "a=-1", "a=0", "a=nan", "a=inf"):
        with pytest.raises(InvalidConfigError, match="a="):
            parse_cost(wrong)


def test_bytes_of_a_stored_token_change_what_reading_it_takes():
    cost = CostModel(0.01, 0, 0, 8e-8, token_bytes=1000)
    assert cost.for_token_bytes(500).context == 4e-8
    assert cost.for_token_bytes(0) == cost
    assert CostModel(0.01, 0, 0, 8e-8).for_token_bytes(500).context == 8e-8


def test_windows_bound_what_attention_reads():
    assert context_of([10, 100], (None, 32)) == 110 + 10 + 32
    assert context_of([10, 100], (None, None)) == 220
