"""Many requests at once: prompts, how many tokens follow each of them, and what a side made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hfpaged.bench.generation import Rows
from hfpaged.bench.prefix_prompts import prompts_of
from hfpaged.bench.random_prompts import SEED, random_ids
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape

SPREAD = 16  # the longest prompt and the longest answer are so many times the shortest


@dataclass(frozen=True)
class Workload:
    """`new[i]` tokens are to follow `prompts[i]`, no more and no fewer."""

    prompts: Rows
    new: Sequence[int]

    @property
    def tokens(self) -> int:
        """How many are generated for all requests."""
        return sum(self.new)

    def part(self, start: int, count: int) -> Workload:
        """`count` requests from `start` on."""
        return Workload(self.prompts[start : start + count], self.new[start : start + count])


@dataclass(frozen=True)
class Run:
    """The new tokens of each request, and the seconds until the last of them was there."""

    rows: Rows
    seconds: float

    @property
    def speed(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.rows)) / self.seconds


def mixed(setting: Setting, shape: Shape) -> Workload:
    """Prompts of up to `shape.prompt` tokens and answers of up to `shape.new`, each from a sixteenth of it on.

    Lengths are drawn evenly, and a long prompt has no longer an answer than a short one.
    """
    lengths, new = mixed_lengths(shape)
    ids: Rows = random_ids(setting, shape.batch, shape.prompt).tolist()
    return Workload([row[:length] for row, length in zip(ids, lengths, strict=True)], new)


def mixed_lengths(shape: Shape) -> tuple[list[int], list[int]]:
    """Of the prompts and of the answers."""
    generator = torch.Generator().manual_seed(SEED)
    return _lengths(shape.batch, shape.prompt, generator), _lengths(shape.batch, shape.new, generator)


def alike(setting: Setting, shape: Shape) -> Workload:
    """Prompts with `shape.prompt` tokens in common, and `shape.new` tokens after each of them."""
    return Workload(prompts_of(setting, shape), [shape.new] * shape.batch)


@contextmanager
def endless(model: PreTrainedModel) -> Iterator[None]:
    """No token ends an answer, so that lengths are those of the workload on every side."""
    config = model.generation_config
    before = config.eos_token_id
    config.eos_token_id = None
    try:
        yield
    finally:
        config.eos_token_id = before


def _lengths(count: int, longest: int, generator: torch.Generator) -> list[int]:
    """`count` lengths, both ends included and the longest among them: it is what the shape promises."""
    drawn: list[int] = torch.randint(max(longest // SPREAD, 1), longest + 1, (count,), generator=generator).tolist()
    drawn[drawn.index(max(drawn))] = longest
    return drawn
