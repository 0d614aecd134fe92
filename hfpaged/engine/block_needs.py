"""How many blocks sequences need: until all that they have is computed, and at the most."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many

from hfpaged.engine.request import SequenceState


class BlockNeeds:
    """`windows` by layer group, None for full attention. `chunk`: the most tokens that one step stores of a sequence,
    None for all that it has; a table with a window holds so many beyond it for a while.
    """

    def __init__(self, windows: Many[int | None], block_size: int, chunk: int | None) -> None:
        self.windows, self._block_size = tuple(windows), block_size
        self._chunk = sys.maxsize if chunk is None else chunk

    @property
    def num_tables(self) -> int:
        """Of one sequence."""
        return len(self.windows)

    def of_length(self, length: int, step: int = sys.maxsize) -> int:
        """Blocks of one sequence of `length` tokens, the most that it holds on its way there where a step brings at
        most `step` of them.
        """
        return sum(self._of_table(length, window, min(step, self._chunk)) for window in self.windows)

    def still(self, seq: SequenceState, more: int = 0) -> int:
        """Blocks that a sequence will take until all that it has, and `more` tokens, are computed."""
        held = 0 if seq.blocks is None else sum(len(table.blocks) for table in seq.blocks.tables)
        return max(self.of_length(len(seq.tokens) + more, seq.num_left + more) - held, 0)

    def at_most(self, num_prompt: int, num_new: int, num_beams: int = 1, *, shared: bool = True) -> int:
        """Blocks of a request that is alone in the pool: of one of its samples, or of all its beams, which have the
        full blocks of the prompt in common where prefixes are `shared`.
        """
        whole = self.of_length(num_prompt + num_new)
        if num_beams == 1:
            return whole
        common = num_prompt // self._block_size * self.windows.count(None) if shared else 0
        # When beams move, the last block of each is copied before its old holder lets go.
        return common + num_beams * (whole - common + len(self.windows))

    def _of_table(self, length: int, window: int | None, step: int) -> int:
        if window is not None:
            length = min(length, window + step + self._block_size)
        return -(-length // self._block_size)
