"""Who holds the sequences of a pool, by name, and the memory map that is made of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfpaged.block_manager import BlockManager
from hfpaged.memory_map import MemoryMap, SequenceBlocks
from hfpaged.pool_contents import fill_blocks
from hfpaged.sequence import Sequence

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool


class Owned(NamedTuple):
    """A sequence under the name by which people know it."""

    sequence: Sequence
    name: str
    kind: str


# Given somebody who holds sequences of a pool: which these are. Called under the lock of the pool.
Describe = Callable[[Any], Iterable[Owned]]


class LiveRows:
    """The rows of the caches on one pool, as long as they live, in the order in which they came."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._count = 0

    def add(self, rows: Any) -> None:
        self._numbers[rows] = None

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._numbers))

    def owned(self, rows: Any, nameless: Container[Sequence]) -> Iterator[Owned]:
        """Which of the `nameless` sequences these rows hold. A cache gets its number when it is named first, so that
        those which live for a part of a forward take none, and keeps it.
        """
        for row, sequence in enumerate(rows.sequences):
            if sequence in nameless:
                if self._numbers[rows] is None:
                    self._numbers[rows], self._count = self._count, self._count + 1
                yield Owned(sequence, f"cache {self._numbers[rows]} row {row}", "cache")


def map_memory(pool: KVPool, asking: Any = None) -> MemoryMap:
    """Of this moment. `asking` are the rows, or who is in the pool's `describers`, whose own sequences come first."""
    with pool.changing() as manager:
        held = _held(pool, manager, asking)
        refcounts, cached, reserved = manager.pool.refcounts, manager.pool.cached, manager.pool.reserved()
        tables = [table for group in manager.copy_tables() for table in group]
    filled = np.maximum(fill_blocks(tables, pool.block_size, len(refcounts)), 0)
    filled[cached] = pool.block_size  # only full blocks are published
    return MemoryMap(
        block_size=pool.block_size,
        block_bytes=pool.storage.block_bytes,
        num_blocks=pool.num_blocks,
        windows=tuple(group.window for group in pool.groups),
        refcounts=tuple(refcounts),
        filled=tuple(filled.tolist()),
        cached=frozenset(cached),
        reserved=reserved,
        sequences=tuple(sorted(held, key=lambda each: not each.is_own)),
    )


def _held(pool: KVPool, manager: BlockManager, asking: Any) -> list[SequenceBlocks]:
    """All sequences that hold blocks, each under the first name that somebody has for it."""
    nameless = dict.fromkeys(manager.sequences)
    held = []
    for owner, (sequence, name, kind) in _owned(pool, nameless):
        if sequence in nameless:
            del nameless[sequence]
            held.append(_blocks_of(sequence, name, kind, owner is asking))
    held += [_blocks_of(each, f"sequence {number}", "other", False) for number, each in enumerate(nameless)]
    return [each for each in held if each.num_blocks]


def _owned(pool: KVPool, nameless: Container[Sequence]) -> Iterator[tuple[Any, Owned]]:
    """What each owner has. Rows come last: a step of a batcher has some for the sequences of its requests."""
    for owner, describe in list(pool.describers.items()):
        yield from ((owner, each) for each in describe(owner))
    for number, sequence in enumerate(pool.prefixes.pinned_sequences):
        yield pool, Owned(sequence, f"pinned {number}", "pinned")
    for rows in pool.live_rows:
        yield from ((rows, each) for each in pool.live_rows.owned(rows, nameless))


def _blocks_of(sequence: Sequence, name: str, kind: str, is_own: bool) -> SequenceBlocks:
    blocks = tuple(tuple(table.blocks) for table in sequence.tables)
    return SequenceBlocks(name, kind, sequence.length, blocks, is_own)
