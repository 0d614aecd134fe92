"""The block pool: a free list and reference counts over plain integers. It knows no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hfpaged.errors import IntegrityError, OutOfBlocksError


@dataclass(frozen=True)
class PoolStats:
    """Blocks by state. `used` are held by at least one block table, `shared` by two or more."""

    total: int
    used: int
    shared: int

    @property
    def free(self) -> int:
        return self.total - self.used


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and counts who holds them.

    Released ids are handed out again before fresh ones, so that storage behind the pool needs to be no larger
    than `high_water` blocks. Refcounts change here and nowhere else.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refcounts: list[int] = []  # by block id, as long as high_water
        self._released: list[int] = []
        self._num_shared = 0

    @property
    def high_water(self) -> int:
        """One more than the largest block id that was ever handed out."""
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    @property
    def num_used(self) -> int:
        return len(self._refcounts) - len(self._released)

    @property
    def stats(self) -> PoolStats:
        return PoolStats(total=self.num_blocks, used=self.num_used, shared=self._num_shared)

    def refcount(self, block: int) -> int:
        """How many block tables hold `block`; 0 for a free one."""
        return self._refcounts[block] if block < len(self._refcounts) else 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with a refcount of one each. Raises OutOfBlocksError and takes none."""
        if count > self.num_free:
            raise OutOfBlocksError(count, self.num_free, self.num_blocks)
        recycled = min(count, len(self._released))
        taken = [self._released.pop() for _ in range(recycled)]
        for block in taken:
            self._refcounts[block] = 1
        fresh = range(self.high_water, self.high_water + count - recycled)
        self._refcounts.extend(1 for _ in fresh)
        return taken + list(fresh)

    def acquire(self, block: int) -> None:
        """One more table holds `block`, which must be in use."""
        if self.refcount(block) == 0:
            raise IntegrityError(f"block {block} was acquired while it is free")
        self._refcounts[block] += 1
        self._num_shared += self._refcounts[block] == 2

    def release(self, block: int) -> None:
        """One table less holds `block`; the last one gives it back."""
        if self.refcount(block) == 0:
            raise IntegrityError(f"block {block} was released while it is free")
        self._refcounts[block] -= 1
        self._num_shared -= self._refcounts[block] == 1
        if self._refcounts[block] == 0:
            self._released.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Recount everything from scratch against all block tables over this pool.

        Raises IntegrityError with what is off.
        """
        counted = [0] * self.high_water
        for table in tables:
            for block in table:
                if not 0 <= block < self.high_water:
                    raise IntegrityError(f"a table holds block {block}; only {self.high_water} were ever handed out")
                counted[block] += 1
        wrong = {
            b: (kept, seen) for b, (kept, seen) in enumerate(zip(self._refcounts, counted, strict=True)) if kept != seen
        }
        if wrong:
            raise IntegrityError(f"refcounts and tables disagree, block: (refcount, tables) = {wrong}")
        free = [block for block, count in enumerate(counted) if count == 0]
        if sorted(self._released) != free:
            raise IntegrityError(f"free list {sorted(self._released)} should be {free}")
        if self.high_water > self.num_blocks:
            raise IntegrityError(f"block {self.high_water - 1} is beyond the pool's {self.num_blocks} blocks")
        if self._num_shared != sum(count > 1 for count in counted):
            raise IntegrityError(f"{self._num_shared} blocks counted as shared, {counted} by block")
