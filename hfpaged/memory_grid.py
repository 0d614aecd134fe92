"""A memory map as a grid of coloured cells: which cell shows what, before anything is drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfpaged.memory_map import MemoryMap

# Cells in one picture; of a larger pool one cell stands for several blocks.
MOST_CELLS = 2048
MOST_COLUMNS = 64
# Owners with a colour of their own; that many can be told apart by people who see colours differently.
MOST_NAMES = 7
LONGEST_NAME = 26
UNUSED, FREE, CACHED = "never used", "free", "cached prefix"
OTHERS = ("others", "more others")  # in turn, so that it is seen where one ends


@dataclass(frozen=True)
class MemoryGrid:
    """Cells row by row. Those beyond the last block are not there.

    per_cell   blocks that one cell stands for
    num_shown  blocks that the cells stand for; all behind them were never used
    cells      what each one shows, what most of its blocks are: the place of a name in `names`, or a word from above
    shared     the cells of which at least half of the blocks in use have several holders
    names      owners with a colour of their own, those with the most blocks
    """

    columns: int
    per_cell: int
    num_shown: int
    cells: tuple[int | str, ...]
    shared: frozenset[int]
    names: tuple[str, ...]
    num_others: int

    @property
    def rows(self) -> int:
        return -(-len(self.cells) // self.columns)


def grid_of(memory: MemoryMap) -> MemoryGrid:
    """A shared block is shown as that of its first holder."""
    largest = sorted(range(len(memory.sequences)), key=lambda number: -memory.sequences[number].num_blocks)
    named = sorted(largest[:MOST_NAMES])
    kinds = _kinds(memory, {number: place for place, number in enumerate(named)})
    shown = _shown(memory)
    per_cell = 1
    while -(-shown // per_cell) > MOST_CELLS:
        per_cell *= 2
    parts = [range(start, min(start + per_cell, shown)) for start in range(0, shown, per_cell)]
    return MemoryGrid(
        columns=_columns(len(parts)),
        per_cell=per_cell,
        num_shown=shown,
        cells=tuple(_most(part, kinds) for part in parts),
        shared=frozenset(number for number, part in enumerate(parts) if _is_shared(memory, part)),
        names=tuple(_short(memory.sequences[number].name) for number in named),
        num_others=len(memory.sequences) - len(named),
    )


def _kinds(memory: MemoryMap, places: dict[int, int]) -> list[int | str]:
    """What each block is that was ever handed out; `places` of sequences with a name."""
    kinds: list[int | str] = [CACHED if block in memory.cached else FREE for block in range(len(memory.refcounts))]
    for number in reversed(range(len(memory.sequences))):  # the first holder is written last
        for block in memory.sequences[number].all_blocks:
            kinds[block] = places.get(number, OTHERS[number % 2])
    return kinds


def _shown(memory: MemoryMap) -> int:
    """A pool that was sized by memory is mostly blocks that were never used: a few of them tell as much as all."""
    ever = len(memory.refcounts)
    if memory.num_blocks <= max(2 * ever, MOST_COLUMNS):
        return memory.num_blocks
    columns = _columns(ever)
    return min(-(-ever // columns) * columns + columns, memory.num_blocks)


def _columns(cells: int) -> int:
    columns = 8
    while columns < MOST_COLUMNS and columns * columns < 2 * cells:
        columns *= 2
    return columns


def _most(part: range, kinds: list[int | str]) -> int | str:
    counts = Counter(kinds[block] if block < len(kinds) else UNUSED for block in part)
    return counts.most_common(1)[0][0]


def _is_shared(memory: MemoryMap, part: range) -> bool:
    counts = [count for count in memory.refcounts[part.start : part.stop] if count]
    return bool(counts) and 2 * sum(count > 1 for count in counts) >= len(counts)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}…{name[-8:]}"
