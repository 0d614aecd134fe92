from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfpaged.prefill_plan import PrefillPlan, plan_prefill


def plan_of(rows, known, at_least=1, forward_cost=0):
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    common = [0] + [common_of(rows[a], rows[b]) for a, b in itertools.pairwise(order)]
    return plan_prefill([len(row) for row in rows], known, order, common, at_least, forward_cost)


def common_of(first, second):
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_one_unknown_prompt_is_computed_in_one_forward():
    assert plan_of([[1] * 9], [0]) == PrefillPlan(9, (), 9)


def test_of_one_known_prompt_the_rest_is_computed_and_no_less_than_the_caller_wants():
    assert plan_of([[1] * 9], [6]) == PrefillPlan(3, (), 3)
    assert plan_of([[1] * 9], [8], at_least=4) == PrefillPlan(4, (), 4)


@pytest.mark.parametrize(("forward_cost", "expected"), [(0, PrefillPlan(2, ((0, 6),), 6 + 3 * 2)), (100, (8, ()))])
def test_a_common_part_is_computed_for_one_row_where_that_pays(forward_cost, expected):
    plan = plan_of([[5] * 6 + [row, row] for row in range(3)], [0] * 3, forward_cost=forward_cost)
    assert plan == expected or (plan.tail, plan.pieces) == expected


def test_parts_within_parts_go_on_where_the_piece_before_ended():
    rows = [[1] * 8 + [2] * 4 + [0], [1] * 8 + [2] * 4 + [1], [1] * 8 + [3] * 4 + [0], [1] * 8 + [3] * 4 + [1]]
    assert plan_of(rows, [0] * 4) == PrefillPlan(1, ((0, 12), (2, 12)), 12 + 4 + 4)


@st.composite
def batches(draw):
    seed = draw(st.integers(0, 10**6))
    draw_from = random.Random(seed)
    stems = [[draw_from.randrange(3) for _ in range(draw_from.randrange(12))] for _ in range(3)]
    rows = [
        (draw_from.choice(stems) + [draw_from.randrange(3) for _ in range(draw_from.randrange(1, 9))])
        for _ in range(draw(st.integers(1, 6)))
    ]
    at_least = draw(st.integers(1, min(map(len, rows))))
    known = [draw_from.randrange(len(row) - at_least + 1) for row in rows]
    return rows, known, at_least, draw(st.sampled_from([0, 1, 3, 32]))


@settings(max_examples=300, deadline=None)
@given(batches())
def test_a_plan_costs_no_more_than_no_sharing_and_reaches_every_token(batch):
    rows, known, at_least, forward_cost = batch
    plan = plan_of(rows, known, at_least, forward_cost)
    assert plan.cost <= len(rows) * max(map(len, rows))
    assert plan.tail >= at_least
    cost, had = plan.tail * len(rows), list(known)
    for row, stop in plan.pieces:
        cost += stop - had[row] + forward_cost
        assert had[row] < stop <= len(rows[row]) - at_least
        for other, tokens in enumerate(rows):
            had[other] = max(had[other], min(stop, common_of(rows[row], tokens)))
    assert cost <= plan.cost  # what later rows have in common with pieces that are not beside them is a gift
    for tokens, have in zip(rows, had, strict=True):
        assert have >= len(tokens) - plan.tail


@settings(max_examples=100, deadline=None)
@given(batches())
def test_what_is_known_never_makes_it_dearer(batch):
    rows, known, at_least, forward_cost = batch
    cold = plan_of(rows, [0] * len(rows), at_least, forward_cost)
    assert plan_of(rows, known, at_least, forward_cost).cost <= cold.cost
