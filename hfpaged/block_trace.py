"""The debug mode of block pool and block manager: who did what with each block last. Other pools pay nothing for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.block_table import BlockCopy
from hfpaged.errors import IntegrityError
from hfpaged.sequence import Sequence

HISTORY = 8  # transitions that are kept of each block, about 1 KB
MOST_TOLD = 8  # blocks whose history an error tells: more of the same tell nothing


class Holder:
    """A sequence as histories name it, also when it is gone. `name` is that of its request or cache, once known."""

    __slots__ = ("name", "number")

    def __init__(self, number: int) -> None:
        self.number, self.name = number, ""

    def __str__(self) -> str:
        return f"sequence {self.number}" + (f" ({self.name})" if self.name else "")


class Transition(NamedTuple):
    """What happened to a block in a step of the pool, by whom (None: the pool itself), and its refcount after it.

    Steps count the forwards of all caches and batchers on the pool.
    """

    step: int
    what: str
    holder: Holder | None
    refcount: int

    def __str__(self) -> str:
        by = f" by {self.holder}" if self.holder else ""
        return f"step {self.step}: {self.what}{by}, refcount {self.refcount}"


class TracedBlockPool(BlockPool):
    """A block pool that remembers the last transitions of each block. `holder` is who acts now, where it is known.

    `on_allocate` is told of blocks that are handed out, before they are filled.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.step = 0
        self.holder: Holder | None = None
        self.on_allocate: Callable[[list[int]], None] = lambda blocks: None
        self.may_be_free: set[int] = set()  # released or evicted since they were looked at last
        self._histories: dict[int, deque[Transition]] = {}

    def history(self, block: int) -> tuple[Transition, ...]:
        """The last transitions of a block, the oldest first."""
        return tuple(self._histories.get(block, ()))

    def note(self, what: str, blocks: Iterable[int]) -> None:
        """Something has happened to blocks."""
        for block in blocks:
            ring = self._histories.get(block)
            if ring is None:
                ring = self._histories[block] = deque(maxlen=HISTORY)
            ring.append(Transition(self.step, what, self.holder, self.refcount(block)))

    def allocate(self, count: int) -> list[int]:
        taken = super().allocate(count)
        try:
            self.note("allocate", taken)
            self.on_allocate(taken)
        except BaseException:  # Ctrl-C, while they are cleared: no table has them yet
            for block in taken:
                self.release(block)
            raise
        return taken

    def acquire(self, block: int) -> None:
        with _Telling(self, block):
            super().acquire(block)
        self.note("acquire", [block])

    def release(self, block: int) -> None:
        with _Telling(self, block):
            super().release(block)
        self.may_be_free.add(block)
        if self._released and self._released[-1] == block:
            self._released.insert(0, self._released.pop())  # the longest free goes first: poison lies longer
        self.note("release", [block])

    def publish(self, block: int) -> None:
        with _Telling(self, block):
            super().publish(block)
        self.note("publish", [block])

    def withdraw(self, block: int) -> None:
        super().withdraw(block)
        self.note("withdraw", [block])

    def _evict(self) -> int:
        block = super()._evict()
        self.may_be_free.add(block)
        self.note("evict", [block])
        return block

    def take_free(self) -> list[int]:
        """Of the blocks that were released or evicted since the last call those that are free."""
        blocks, self.may_be_free = self.may_be_free, set()
        return [block for block in blocks if not self.refcount(block) and block not in self._cached]

    def told(self, error: IntegrityError) -> IntegrityError:
        """The same error, with the last transitions of the blocks that are off."""
        return IntegrityError(f"{error}{self.histories(error.blocks)}", error.blocks)

    def histories(self, blocks: Iterable[int]) -> str:
        """Lines for an error: each block with its last transitions."""
        blocks = sorted(set(blocks))
        lines = [f"\nblock {block}: " + ("; ".join(map(str, self.history(block))) or "never handed out")
                 for block in blocks[:MOST_TOLD]]  # fmt: skip
        return "".join(lines) + (f"\nand {len(blocks) - MOST_TOLD} more blocks" if len(blocks) > MOST_TOLD else "")


class _Telling:
    """An IntegrityError that leaves it has the history of the block with it."""

    def __init__(self, pool: TracedBlockPool, block: int) -> None:
        self._pool, self._block = pool, block

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, IntegrityError):
            raise self._pool.told(IntegrityError(str(error), [self._block])) from error


class HolderPool:
    """The traced pool as the tables of one sequence see it: what they do is done by that sequence."""

    def __init__(self, pool: TracedBlockPool, holder: Holder) -> None:
        self._pool, self.holder = pool, holder
        self.refcount, self.is_published = pool.refcount, pool.is_published

    def allocate(self, count: int) -> list[int]:
        """See BlockPool."""
        with self:
            return self._pool.allocate(count)

    def acquire(self, block: int) -> None:
        """See BlockPool."""
        with self:
            self._pool.acquire(block)

    def release(self, block: int) -> None:
        """See BlockPool."""
        with self:
            self._pool.release(block)

    def __enter__(self) -> None:
        self._pool.holder = self.holder

    def __exit__(self, *error: object) -> None:
        self._pool.holder = None


class TracedBlockManager(BlockManager):
    """A block manager that tells the traced pool who acts, and refuses to let a step read blocks that are free.

    `names` gives the names by which people know the sequences that are there.
    """

    pool: TracedBlockPool

    def __init__(
        self, pool: TracedBlockPool, num_groups: int, block_size: int, windows: Many[int | None] | None,
        names: Callable[[], Iterable[tuple[Sequence, str]]] = tuple,
    ) -> None:  # fmt: skip
        super().__init__(pool, num_groups, block_size, windows)
        self.names = names
        self._count = 0
        self._holders: dict[Sequence, Holder] = {}

    def holder(self, sequence: Sequence) -> Holder:
        """How histories name a sequence."""
        return self._holders[sequence]

    def grow(self, growth: Many[tuple[Sequence, int]]) -> list[list[BlockCopy]]:
        self.pool.step += 1
        self._name(sequence for sequence, _ in growth)
        for sequence, _ in growth:
            self._check_held(sequence)
        copies = super().grow(growth)
        for copy in (copy for group in copies for copy in group):
            self.pool.note(f"copy from block {copy.source}", [copy.target])
            self.pool.note(f"copy to block {copy.target}", [copy.source])
        return copies

    def free(self, sequence: Sequence) -> None:
        super().free(sequence)
        self._holders.pop(sequence, None)

    def _check_held(self, sequence: Sequence) -> None:
        """A table that holds a free block would read what is no longer its own, or another's."""
        free = [block for table in sequence.tables for block in table.blocks if not self.pool.refcount(block)]
        if free:
            said = f"{self._holders[sequence]} is about to read blocks {sorted(set(free))}, which are free"
            raise self.pool.told(IntegrityError(said, free))

    def _name(self, sequences: Iterable[Sequence]) -> None:
        if any(not self._holders[sequence].name for sequence in sequences):
            for sequence, name in self.names():
                if sequence in self._holders:
                    self._holders[sequence].name = name

    def _pool_of_next(self) -> HolderPool:
        self._count += 1
        self._next = HolderPool(self.pool, Holder(self._count))
        return self._next

    def _keep(self, sequence: Sequence) -> Sequence:
        self._holders[sequence] = self._next.holder
        return super()._keep(sequence)
