"""The block pool: a free list and reference counts over plain integers. It knows no torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from hfpaged.errors import IntegrityError, OutOfBlocksError


@dataclass(frozen=True)
class PoolStats:
    """Blocks by state. `used` are held by at least one block table, `shared` by two or more; `cached` are held by
    none and keep a published prefix until their memory is needed, so they count as free.
    """

    total: int
    used: int
    shared: int
    cached: int = 0
    reserved: int = 0

    @property
    def free(self) -> int:
        return max(self.total - self.used - self.reserved, 0)


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and counts who holds them.

    Released ids are handed out again before fresh ones, so that storage behind the pool needs to be no larger
    than `high_water` blocks. Refcounts change here and nowhere else.

    A published block keeps its contents when its last holder releases it: it is cached, and taken for something else
    only when no other block is left, the least recently released first. `on_evict` is told then. At most `max_cached`
    are kept (None: as many as there is room for). `on_free` is told of each block that its last holder releases.

    `reserved` says how many blocks' worth of memory something else takes, which is not there for blocks then.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.max_cached: int | None = None
        self.on_evict: Callable[[int], None] = lambda block: None
        self.on_free: Callable[[int], None] = lambda block: None
        self.reserved: Callable[[], int] = lambda: 0
        self._refcounts: list[int] = []  # by block id, as long as high_water
        self._released: list[int] = []
        self._published: set[int] = set()
        # Published and held by nobody, least recently released first. A plain dict looks for its first key behind all
        # those that were taken from it: 23 s to drop 100,000.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_shared = 0

    @property
    def high_water(self) -> int:
        """One more than the largest block id that was ever handed out."""
        return len(self._refcounts)

    def reserve(self, count: int) -> None:
        """Let so many blocks have been handed out and released: another process, whose steps are followed here, has."""
        fresh = range(self.high_water, count)
        self._refcounts += [0] * len(fresh)
        self._released += fresh

    @property
    def num_free(self) -> int:
        return max(self.num_blocks - self.num_used - self.reserved(), 0)

    @property
    def num_used(self) -> int:
        """Blocks that block tables hold."""
        return len(self._refcounts) - len(self._released) - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def cached(self) -> list[int]:
        """The cached blocks, the least recently used first."""
        return list(self._cached)

    @property
    def refcounts(self) -> list[int]:
        """How many block tables hold each block that was ever handed out, by block id."""
        return list(self._refcounts)

    @property
    def num_unused(self) -> int:
        """Blocks that can be published and cached without anything being evicted."""
        unused = self.num_free - self.num_cached
        return unused if self.max_cached is None else max(min(unused, self.max_cached - self.num_cached), 0)

    @property
    def stats(self) -> PoolStats:
        return PoolStats(self.num_blocks, self.num_used, self._num_shared, self.num_cached, self.reserved())

    def refcount(self, block: int) -> int:
        """How many block tables hold `block`; 0 for a free one."""
        return self._refcounts[block] if block < len(self._refcounts) else 0

    def holding(self, holdings: Many[Many[int]]) -> tuple[int, int, float]:
        """Of somebody who holds the blocks of these tables: (blocks, those of them that others hold too, what he bears
        of them, where each holder bears an equal part).
        """
        if not self._num_shared:
            count = sum(map(len, holdings))
            return count, 0, count
        counts = self._refcounts
        if len(holdings) == 1:  # as a rule
            held = [counts[block] for block in holdings[0]]
            shared = len(held) - held.count(1)
            return len(held), shared, (len(held) - shared) + sum(1 / count for count in held if count > 1)
        own = Counter(block for blocks in holdings for block in blocks)
        shared = sum(counts[block] > number for block, number in own.items())
        return len(own), shared, sum(number / counts[block] for block, number in own.items())

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with a refcount of one each. Raises OutOfBlocksError and takes none."""
        if count > self.num_free:
            raise OutOfBlocksError(count, self.num_free, self.num_blocks)
        recycled = min(count, len(self._released))
        taken = [self._released.pop() for _ in range(recycled)]
        for block in taken:
            self._refcounts[block] = 1
        fresh = range(self.high_water, min(self.high_water + count - recycled, self.num_blocks))
        self._refcounts.extend(1 for _ in fresh)
        taken += fresh
        try:
            for _ in range(count - len(taken)):
                taken.append(self._evict())
                self._refcounts[taken[-1]] = 1
        except BaseException:  # Ctrl-C, while somebody looked at what was evicted
            for block in taken:
                self._refcounts[block] = 0
            self._released += taken
            raise
        return taken

    def acquire(self, block: int) -> None:
        """One more table holds `block`, which must be in use or cached."""
        if self.refcount(block) == 0 and block not in self._cached:
            raise IntegrityError(f"block {block} was acquired while it is free")
        self._cached.pop(block, None)
        self._refcounts[block] += 1
        self._num_shared += self._refcounts[block] == 2

    def release(self, block: int) -> None:
        """One table less holds `block`; the last one gives it back."""
        if self.refcount(block) == 0:
            raise IntegrityError(f"block {block} was released while it is free")
        self._refcounts[block] -= 1
        self._num_shared -= self._refcounts[block] == 1
        if self._refcounts[block] == 0:
            self.on_free(block)
            if block not in self._published:
                self._released.append(block)
                return
            self._cached[block] = None
            if self.max_cached is not None and len(self._cached) > self.max_cached:
                self._released.append(self._evict())

    def is_published(self, block: int) -> bool:
        """Whether others may find `block` by its contents, which must not change then."""
        return block in self._published

    def publish(self, block: int) -> None:
        """The contents of `block`, which is in use, are complete and can be found by others from now on."""
        if self.refcount(block) == 0:
            raise IntegrityError(f"block {block} was published while it is free")
        self._published.add(block)

    def withdraw(self, block: int) -> None:
        """Undo `publish` for a block in use."""
        self._published.remove(block)

    def evict(self, block: int) -> None:
        """`block`, which is in use and published, is about to change."""
        self.withdraw(block)
        self.on_evict(block)

    def published(self) -> set[int]:
        """All published blocks, in use or cached."""
        return set(self._published)

    def drop_cached(self) -> int:
        """Forget all cached blocks; how many there were."""
        count = len(self._cached)
        for _ in range(count):
            self._released.append(self._evict())
        return count

    def _evict(self) -> int:
        """Take the least recently used cached block; it is on no list then."""
        block, _ = self._cached.popitem(last=False)
        self._published.remove(block)
        try:
            self.on_evict(block)
        except BaseException:
            self._released.append(block)
            raise
        return block

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Recount everything from scratch against all block tables over this pool.

        Raises IntegrityError with what is off.
        """
        counted = [0] * self.high_water
        for table in tables:
            for block in table:
                if not 0 <= block < self.high_water:
                    raise IntegrityError(
                        f"a table holds block {block}; only {self.high_water} were ever handed out", [block]
                    )
                counted[block] += 1
        wrong = {
            b: (kept, seen) for b, (kept, seen) in enumerate(zip(self._refcounts, counted, strict=True)) if kept != seen
        }
        if wrong:
            raise IntegrityError(f"refcounts and tables disagree, block: (refcount, tables) = {wrong}", wrong)
        free = [block for block, count in enumerate(counted) if count == 0]
        listed = sorted([*self._released, *self._cached])
        if listed != free:
            off = (Counter(listed) - Counter(free)) + (Counter(free) - Counter(listed))
            raise IntegrityError(f"free list and cached blocks {listed} should be {free}", off)
        if unpublished := sorted(self._cached.keys() - self._published):
            raise IntegrityError(f"cached blocks {unpublished} are not published", unpublished)
        if published := sorted(self._published.intersection(self._released)):
            raise IntegrityError(f"free blocks {published} are still published", published)
        if self.high_water > self.num_blocks:
            raise IntegrityError(f"block {self.high_water - 1} is beyond the pool's {self.num_blocks} blocks")
        if self._num_shared != sum(count > 1 for count in counted):
            raise IntegrityError(f"{self._num_shared} blocks counted as shared, {counted} by block")
