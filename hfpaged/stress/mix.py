"""What is asked for: requests of all kinds, drawn by chance from a seed, long enough to fill a pool."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# How often each kind comes. One in twenty is refused.
WEIGHTS = {
    "long prompt": 6,
    "long output": 6,
    "common prefix": 6,
    "samples": 2,
    "beams": 2,
    "sampled": 2,
    "too long": 1,
}
SEVERAL = ("samples", "beams")  # of several sequences each
ABORTED = 0.15  # of all requests
PREFIXES = 4  # common beginnings at a time
PREFIX_LIVES = 40  # requests until one of them gives way to a new one
# Tokens of all that may run at once against those of the pool: more waits, and is always there when blocks come back.
PRESSURE = 1.7
SHORTEST = 8


@dataclass(frozen=True)
class Room:
    """A pool as lengths see it: its blocks, how many tokens are in each, and the window of each layer group."""

    num_blocks: int
    block_size: int
    windows: Sequence[int | None]

    def blocks(self, length: int) -> int:
        """Those of one sequence. A window lies across one block more than it fills."""
        held = (length if window is None else min(length, window + self.block_size) for window in self.windows)
        return sum(-(-tokens // self.block_size) for tokens in held)

    def longest(self, blocks: float, most: int) -> int:
        """The most tokens, up to `most`, of a sequence that takes no more blocks than that; at least one."""
        return max(bisect_right(range(1, most + 1), blocks, key=self.blocks), 1)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request, prompt and output together: on average, and at most."""

    mean: int
    longest: int

    @classmethod
    def filling(cls, room: Room, sequences: int, longest: int | None, mean: int | None = None) -> Lengths:
        """So many sequences at once fill the pool, and none takes more than half of it. `mean`: if they shall have so
        many tokens instead.
        """
        longest = room.longest(room.num_blocks / 2, longest or room.num_blocks * room.block_size)
        if mean is None:
            mean = max(room.longest(PRESSURE * room.num_blocks / sequences, longest), SHORTEST)
        return cls(min(mean, max(longest * 2 // 3, 2)), longest)

    def draw(self, rng: random.Random) -> int:
        """One of them, from half to one and a half of the mean."""
        return min(max(int(self.mean * rng.uniform(0.5, 1.5)), 4), self.longest)


@dataclass(frozen=True)
class Attempt:
    """One request. It is aborted after `abort_after` steps, if it is still there then."""

    kind: str
    prompt: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    sequences: int = 1
    abort_after: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens are those of the model alone, whatever happens around it."""
        return not self.settings["do_sample"] and self.sequences == 1


class Mix:
    """Draws requests. The same seed gives the same ones in the same order."""

    def __init__(self, rng: random.Random, alphabet: Sequence[int], lengths: Lengths, most_sequences: int) -> None:
        self._rng, self._alphabet, self.lengths = rng, alphabet, lengths
        self._weights = WEIGHTS if most_sequences > 1 else {k: v for k, v in WEIGHTS.items() if k not in SEVERAL}
        self._several = (2, min(3, most_sequences))
        self._prefixes = [self._prefix() for _ in range(PREFIXES)]

    def attempt(self, fills: bool = False) -> Attempt:
        """The next request, of any kind, or with `fills` one that takes blocks at once."""
        rng = self._rng
        (kind,) = ["long prompt"] if fills else rng.choices(list(self._weights), list(self._weights.values()))
        length = self.lengths.draw(rng)
        abort_after = rng.randrange(1, length + 2) if rng.random() < ABORTED else None
        if rng.random() < 1 / PREFIX_LIVES:
            self._prefixes[rng.randrange(PREFIXES)] = self._prefix()
        if kind == "too long":
            return self._make(kind, self.ids(4), 10**9, abort_after)
        if kind == "common prefix":
            prompt = rng.choice(self._prefixes) + self.ids(max(length // 5, 1))
            return self._make(kind, prompt, max(length // 3, 1), abort_after)
        share = {"long prompt": 0.85, "long output": 0.15}.get(kind, 0.5)
        prompt = self.ids(max(int(length * share), 1))
        new = max(length - len(prompt), 1)
        several = rng.choice(self._several)
        if kind == "samples":
            return self._make(kind, prompt, new, abort_after, several, n=several, do_sample=True)
        if kind == "beams":
            return self._make(kind, prompt, new, abort_after, several, num_beams=several)
        return self._make(kind, prompt, new, abort_after, do_sample=kind == "sampled")

    def ids(self, count: int) -> list[int]:
        """Tokens without a sense."""
        return self._rng.choices(self._alphabet, k=count)

    def _prefix(self) -> list[int]:
        return self.ids(max(min(self.lengths.mean // 2, self.lengths.longest // 3), 1))

    def _make(
        self, kind: str, prompt: list[int], new: int, abort_after: int | None, sequences: int = 1, **settings: Any
    ) -> Attempt:
        settings = {"max_new_tokens": new, "do_sample": False, "seed": self._rng.randrange(2**31)} | settings
        return Attempt(kind, prompt, settings, sequences, abort_after)
