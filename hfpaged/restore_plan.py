"""Which blocks must come back from the tiers below so that more of a prompt is known."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from hfpaged.block_table import GONE
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_index import PrefixIndex
from hfpaged.usable_prefix import first_needed, usable_lengths

# The layer groups whose blocks of an entry can be had below.
Find = Callable[[PrefixBlock], Collection[int]]


class Wanted(NamedTuple):
    """A block that is to come back: of block `number` of the chain, for a layer group."""

    number: int
    group: int


@dataclass(frozen=True)
class RestorePlan:
    """The first blocks of a prompt, in order, some of which the index may not know, and those that are to come back."""

    chain: list[PrefixBlock]
    wanted: list[Wanted]

    @property
    def length(self) -> int:
        """Blocks."""
        return len(self.chain)


class Reachable:
    """As much of the first `limit` tokens of `items` under `root` as can be had, with what lies below."""

    def __init__(
        self, index: PrefixIndex, windows: Many[int | None], root: Root, items: array[int], limit: int, find: Find
    ) -> None:
        self._windows, self._block_size = windows, index.block_size
        self._chain: list[PrefixBlock] = []
        self._there: list[list[bool]] = []  # by block and group: in the pool or below
        self._walk(index, root, items, limit, find)
        self.lengths = usable_lengths(self._there, windows, index.block_size)
        self._lacking = [
            [0, *accumulate(entry.blocks[group] == GONE for entry in self._chain)] for group in range(len(windows))
        ]

    @property
    def length(self) -> int:
        """Blocks of the longest usable chain."""
        return max(self.lengths, default=0)

    @property
    def blocks(self) -> list[int]:
        """Those of the chain that are in the pool."""
        return [block for entry in self._chain for block in entry.blocks if block != GONE]

    def plan(self, most: int, longest: int | None = None) -> RestorePlan:
        """For the longest usable chain, of at most `longest` blocks, for which at most `most` blocks must come back."""
        lengths = [length for length in self.lengths if longest is None or length <= longest]
        while lengths and self._count(lengths[-1]) > most:
            lengths.pop()
        length = lengths[-1] if lengths else 0
        wanted = [
            Wanted(number, group)
            for number in range(length)
            for group, window in enumerate(self._windows)
            if self._chain[number].blocks[group] == GONE
            and number >= first_needed(length, window, self._block_size)
        ]  # fmt: skip
        return RestorePlan(self._chain[:length], wanted)

    def _walk(self, index: PrefixIndex, root: Root, items: array[int], limit: int, find: Find) -> None:
        size = index.block_size * root.width
        parent: PrefixBlock | Root = index.settled(root)
        for start in range(0, limit // index.block_size * size, size):
            own = items[start : start + size]
            entry = index.child(parent, own, counted=False) or index.unknown(parent, own)
            there = [block != GONE for block in entry.blocks]
            for group in find(entry) if not all(there) else ():
                there[group] = True
            if not all(is_there for is_there, window in zip(there, self._windows, strict=True) if window is None):
                return
            self._chain.append(entry)
            self._there.append(there)
            parent = entry

    def _count(self, length: int) -> int:
        """How many blocks must come back for so many of the chain."""
        return sum(
            lacking[length] - lacking[first_needed(length, window, self._block_size)]
            for lacking, window in zip(self._lacking, self._windows, strict=True)
        )
