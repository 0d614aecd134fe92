"""How much of a known chain of blocks can be used: in layer groups with a window not every block is needed, and some
that are gone are.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from hfpaged.layer_groups import visible_offset

Windows = Many[int | None]


def usable_lengths(there: Iterable[Many[bool]], windows: Windows, block_size: int) -> list[int]:
    """How many blocks of a chain may be used, all possible numbers, the smallest first.

    `there` says of each block in turn which layer groups have it; those of full attention have all. In groups with a
    window all that the token behind them sees must be there.
    """
    runs = [0] * len(windows)  # blocks in a row, up to the one looked at, that are there
    lengths = []
    for number, groups in enumerate(there, start=1):
        runs = [run + 1 if is_there else 0 for run, is_there in zip(runs, groups, strict=True)]
        if _sees_all(number, runs, windows, block_size):
            lengths.append(number)
    return lengths


def first_needed(count: int, window: int | None, block_size: int) -> int:
    """The first of `count` full blocks that the token behind them sees."""
    return visible_offset(count * block_size, window) // block_size


def _sees_all(count: int, runs: Many[int], windows: Windows, block_size: int) -> bool:
    """Whether `runs` blocks before the end of `count` full ones are all that the next token sees."""
    return all(
        window is None or run >= count - first_needed(count, window, block_size)
        for window, run in zip(windows, runs, strict=True)
    )
