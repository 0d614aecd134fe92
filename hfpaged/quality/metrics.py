"""Measures of how far two models, or two runs of one, are apart. Each is a few lines of its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenScores(NamedTuple):
    """Of each position, all of one shape: KL divergence in nats, the negative log-likelihoods of the token that really
    follows, and whether both find the same token likeliest.
    """

    kl: Tensor
    nll_native: Tensor
    nll: Tensor
    agrees: Tensor


class Summary(NamedTuple):
    """Of all positions. `ppl_change` is a part of 1, `ppl_error` its standard error."""

    perplexity_native: float
    perplexity: float
    ppl_change: float
    ppl_error: float
    kl_mean: float
    kl_p99: float
    top1: float


def log_probs(logits: Tensor) -> Tensor:
    """In float64, as small divergences are differences of nearly equal numbers; float32 where a device has no more."""
    return torch.log_softmax(logits.to(torch.float32 if logits.device.type == "mps" else torch.float64), dim=-1)


def score(native: Tensor, other: Tensor, targets: Tensor) -> TokenScores:
    """Compare log-probabilities [..., vocabulary]; `targets` [...] are the token ids that really follow."""
    # Where the native distribution has no mass the term is 0, whatever the other one says.
    terms = torch.where(native.isneginf(), 0.0, native.exp() * (native - other))
    chosen = targets.unsqueeze(-1)
    return TokenScores(
        kl=terms.sum(dim=-1),
        nll_native=-native.gather(-1, chosen).squeeze(-1),
        nll=-other.gather(-1, chosen).squeeze(-1),
        agrees=native.argmax(dim=-1) == other.argmax(dim=-1),
    )


def summarize(scores: TokenScores) -> Summary:
    """Perplexity is exp of the mean negative log-likelihood. Its change is taken from the differences token by token,
    most of whose scatter cancels; the standard error is that of their mean.
    """
    kl, native, other = scores.kl.flatten(), scores.nll_native.flatten(), scores.nll.flatten()
    difference = other - native
    ratio = float(difference.mean().exp())
    error = float(difference.std(unbiased=True)) / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return Summary(
        perplexity_native=float(native.mean().exp()),
        perplexity=float(other.mean().exp()),
        ppl_change=ratio - 1,
        ppl_error=ratio * error,
        kl_mean=float(kl.mean()),
        kl_p99=float(torch.quantile(kl, 0.99)),
        top1=float(scores.agrees.double().mean()),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place, from 1, where two rows of tokens differ; None for equal ones."""
    pairs = enumerate(zip(one, other, strict=False), start=1)
    place = next((number for number, (a, b) in pairs if a != b), None)
    return min(len(one), len(other)) + 1 if place is None and len(one) != len(other) else place


def rouge_l(reference: Sequence[int], candidate: Sequence[int]) -> float:
    """F1 of the longest common subsequence of tokens (ROUGE-L, Lin 2004, with recall and precision weighed alike)."""
    if not reference or not candidate:
        return float(list(reference) == list(candidate))
    common = _common_subsequence(reference, candidate)
    return 2 * common / (len(reference) + len(candidate))


def _common_subsequence(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest one, by the table of Wagner and Fischer, a row at a time."""
    lengths = [0] * (len(other) + 1)
    for a in one:
        previous = lengths
        lengths = [0]
        for place, b in enumerate(other, start=1):
            lengths.append(previous[place - 1] + 1 if a == b else max(previous[place], lengths[-1]))
    return lengths[-1]
