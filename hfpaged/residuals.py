"""Residuals: places where blocks that are not full yet are kept unquantized, for formats that quantize whole blocks.

"Residual" is the word of Liu et al. 2024, "KIVI", arXiv 2402.02750. Here it is one block of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from hfpaged.errors import IntegrityError

# What `Residuals.of` says of a block whose tokens lie in the block itself.
NONE = -1


class Residuals:
    """Which block has which residual. A block has one from its first token until it is full, or free."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._free: list[int] = []
        # One more than the largest residual that was ever handed out. A number of its own: stores ask for it while
        # another thread moves one from one list to the other.
        self.high_water = 0

    @property
    def num_open(self) -> int:
        return len(self._of)

    def of(self, block: int) -> int:
        """The residual of a block, NONE where it has none."""
        return self._of.get(block, NONE)

    def open(self, block: int) -> int:
        """A residual for `block`, which has none."""
        if not self._free:
            self._free.append(self.high_water)
            self.high_water += 1
        residual = self._of[block] = self._free.pop()
        return residual

    def reserve(self, count: int) -> None:
        """Have at least so many: another process, whose steps are followed here, hands them out."""
        self._free += range(self.high_water, count)
        self.high_water = max(self.high_water, count)

    def close(self, block: int) -> None:
        """`block` is full or free: what it has, if it has one, may be handed out again."""
        residual = self._of.pop(block, NONE)
        if residual != NONE:
            self._free.append(residual)

    def check_integrity(self, refcount: Callable[[int], int]) -> None:
        """Raises IntegrityError where a free block has a residual, or one residual is in two places."""
        idle = sorted(block for block in self._of if refcount(block) == 0)
        if idle:
            raise IntegrityError(f"free blocks {idle} still have residuals", idle)
        listed = sorted([*self._of.values(), *self._free])
        if listed != list(range(self.high_water)):
            raise IntegrityError(f"residuals {listed} are in use or free; each of {self.high_water} should be, once")
