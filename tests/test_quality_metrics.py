"""Each measure against numbers worked out by hand or by another formula."""

from __future__ import annotations

import math

import pytest
import torch

from hfpaged.quality.generations import parting
from hfpaged.quality.metrics import TokenScores, first_difference, log_probs, rouge_l, score, summarize


def of(*probabilities):
    """Log-probabilities of one position."""
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_kl_divergence_of_two_coins_by_hand():
    found = score(of(0.5, 0.5), of(0.25, 0.75), torch.tensor([0]))
    assert found.kl.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert found.nll_native.item() == pytest.approx(math.log(2))
    assert found.nll.item() == pytest.approx(math.log(4))


def test_kl_divergence_is_native_against_the_other_and_not_the_reverse():
    forward = score(of(0.9, 0.1), of(0.5, 0.5), torch.tensor([0])).kl.item()
    backward = score(of(0.5, 0.5), of(0.9, 0.1), torch.tensor([0])).kl.item()
    assert forward == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert backward == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5))
    assert forward != pytest.approx(backward)


def test_kl_divergence_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    native, other = (log_probs(torch.randn(7, 50, generator=generator) * 3) for _ in range(2))
    found = score(native, other, torch.zeros(7, dtype=torch.int64)).kl
    expected = torch.nn.functional.kl_div(other, native, reduction="none", log_target=True).sum(dim=-1)
    assert torch.allclose(found, expected)
    assert found.dtype == torch.float64


def test_a_token_without_native_mass_adds_nothing_and_one_that_only_the_other_lacks_is_infinite():
    assert score(of(1.0, 0.0), of(0.5, 0.5), torch.tensor([0])).kl.item() == pytest.approx(math.log(2))
    assert score(of(1.0, 0.0), of(1.0, 0.0), torch.tensor([0])).kl.item() == 0
    assert score(of(0.5, 0.5), of(1.0, 0.0), torch.tensor([0])).kl.item() == math.inf


def test_the_likeliest_tokens_are_compared_position_by_position():
    native = torch.cat([of(0.7, 0.3), of(0.2, 0.8), of(0.6, 0.4)])
    other = torch.cat([of(0.9, 0.1), of(0.51, 0.49), of(0.55, 0.45)])
    assert score(native, other, torch.tensor([0, 0, 0])).agrees.tolist() == [True, False, True]


def scores(kl, native, other, agrees=None):
    agrees = [True] * len(kl) if agrees is None else agrees
    return TokenScores(*(torch.tensor([part], dtype=torch.float64) for part in (kl, native, other, agrees)))


def test_perplexity_and_its_change_with_the_error_of_paired_differences():
    found = summarize(scores([0.0] * 4, [1.0, 2.0, 3.0, 4.0], [1.1, 2.1, 3.1, 4.3]))
    assert found.perplexity_native == pytest.approx(math.exp(2.5))
    assert found.perplexity == pytest.approx(math.exp(2.65))
    assert found.ppl_change == pytest.approx(math.exp(0.15) - 1)
    assert found.ppl_error == pytest.approx(math.exp(0.15) * 0.1 / math.sqrt(4))  # std of 0.1 0.1 0.1 0.3 is 0.1


def test_mean_percentile_and_agreement():
    kl = [number / 100 for number in range(101)]
    found = summarize(scores(kl, [0.0] * 101, [0.0] * 101, [number < 100 for number in range(101)]))
    assert found.kl_mean == pytest.approx(0.5)
    assert found.kl_p99 == pytest.approx(0.99)
    assert found.top1 == pytest.approx(100 / 101)


def test_a_broken_format_gives_figures_that_are_no_numbers_and_no_exception():
    found = summarize(scores([math.nan, 1.0], [1.0, 1.0], [math.nan, 2000.0]))
    assert math.isnan(found.ppl_change)
    assert math.isnan(found.kl_mean)
    assert summarize(scores([1.0], [1.0], [2000.0])).ppl_change == math.inf


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [9, 2, 3], 1), ([1, 2, 3], [1, 2, 9], 3), ([1, 2], [1, 2, 3], 3)],
)
def test_the_first_different_token_counts_from_one(one, other, place):
    assert first_difference(one, other) == place


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [5, 6, 7, 8], 0.0),
        ([1, 2, 3, 4], [1, 9, 3, 9], 0.5),
        ([1, 2, 3, 4], [4, 3, 2, 1], 0.25),
        ([1, 2, 3, 4, 5, 6], [2, 4], 0.5),  # recall 2/6, precision 1
        ([], [], 1.0),
        ([], [1], 0.0),
    ],
)
def test_rouge_l_by_hand(one, other, expected):
    assert rouge_l(one, other) == pytest.approx(expected)


def test_rouge_l_finds_the_longest_subsequence_of_all():
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        one, other = (torch.randint(0, 4, (7,), generator=generator).tolist() for _ in range(2))
        assert rouge_l(one, other) == pytest.approx(longest_of_all(one, other) / 7)


def longest_of_all(one, other):
    """By trying every subsequence of one of them."""

    def holds(parts):
        rest = iter(other)
        return all(part in rest for part in parts)

    subsets = ([n for i, n in enumerate(one) if mask >> i & 1] for mask in range(1 << len(one)))
    return max(len(subset) for subset in subsets if holds(subset))


def test_generations_are_told_by_the_earliest_parting_and_the_mean_likeness():
    found = parting([[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 3, 4], [1, 2, 9, 9]])
    assert (found.parts_at, found.equal, found.rouge_l) == (3, 0.5, 0.75)
    assert parting([[1, 2]], [[1, 2]]) == (None, 1.0, 1.0)
