"""Greedy generations with the native cache and with others, from the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.bench.generation import Rows, generate
from hfpaged.quality.metrics import first_difference, rouge_l
from hfpaged.quality.sides import NATIVE, Side

NEW = 64  # tokens
PROMPTS = 4


class Parting(NamedTuple):
    """How far generations go together: see `Figures`."""

    parts_at: int | None
    equal: float
    rouge_l: float


def compare_generations(model: PreTrainedModel, prompts: Tensor, sides: Sequence[Side], new: int) -> list[Parting]:
    """For each side, how far its rows of `new` tokens behind `prompts` [rows, length] are the native ones."""
    native = _greedy(model, prompts, NATIVE, new)
    return [parting(native, _greedy(model, prompts, side, new)) for side in sides]


def parting(native: Rows, other: Rows) -> Parting:
    """Compare rows of tokens, pair by pair."""
    pairs = list(zip(native, other, strict=True))
    places = [first_difference(*pair) for pair in pairs]
    apart = [place for place in places if place is not None]
    mean = sum(rouge_l(*pair) for pair in pairs) / len(pairs)
    return Parting(min(apart, default=None), 1 - len(apart) / len(pairs), mean)


def _greedy(model: PreTrainedModel, prompts: Tensor, side: Side, new: int) -> Rows:
    """Without an early end, so that all rows are of one length."""
    cache = side.make_cache(model)
    try:
        return generate(model, prompts, cache, new, min_new_tokens=new)
    finally:
        cache.free()
