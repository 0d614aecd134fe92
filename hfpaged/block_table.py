"""The block table: the ordered block ids of one sequence in one layer group."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from hfpaged.stream_rule import StreamRule

# Stands for the id of a block that a table, or the prefix index, has no longer.
GONE = -1


@dataclass(frozen=True)
class BlockCopy:
    """One copy-on-write: the storage has to copy block `source` to block `target` before anything is written.
    `residuals` are (source, target) where what is copied lies in a residual.
    """

    source: int
    target: int
    residuals: tuple[int, int] | None = None


class Blocks(Protocol):
    """What a table needs of a block pool, see there."""

    def refcount(self, block: int, /) -> int: ...
    def is_published(self, block: int, /) -> bool: ...
    def allocate(self, count: int) -> list[int]: ...
    def acquire(self, block: int) -> None: ...
    def release(self, block: int) -> None: ...


class BlockTable:
    """Maps positions 0 .. length - 1 to slots. Shared blocks are copied when this table must write into them.

    Of a table with a window the leading blocks are released as the window leaves them behind:

        blocks of the sequence   0   1   2   3   4   5
        held in `blocks`                 2   3   4   5     first = 2: positions before 2 * block_size are gone

    With a `rule` of StreamingLLM the `kept` leading ones stay, and `first` of those behind them are released.
    """

    def __init__(self, pool: Blocks, block_size: int, rule: StreamRule | None = None) -> None:
        self._pool = pool
        self.block_size = block_size
        self.rule = rule
        self.kept = rule.kept if rule else 0
        self.blocks = array("i")  # a C array, so that a step copies it in one go
        self.first = 0  # how many blocks have been released: which one of the sequence blocks[kept] is, less `kept`
        self.length = 0  # all tokens that were stored, those of released blocks too

    def must_copy(self, count: int, released: int = 0) -> bool:
        """Whether appending `count` tokens writes into a block that others hold too, or can find by its contents.

        `released` is how many of them will have let go of that block by then.
        """
        if count == 0 or self.length % self.block_size == 0:
            return False
        return self._pool.refcount(self.blocks[-1]) - released > 1 or self._pool.is_published(self.blocks[-1])

    def num_new_blocks(self, count: int) -> int:
        """How many fresh blocks `count` more tokens need, copies not counted."""
        return -(-(self.length + count) // self.block_size) - self.first - len(self.blocks)

    def grow(self, count: int) -> list[BlockCopy]:
        """Make room for `count` more tokens. Raises OutOfBlocksError and leaves the table as it was."""
        must_copy, fresh = self.must_copy(count), self.num_new_blocks(count)
        if not must_copy and not fresh:  # most steps of a decode
            self.length += count
            return []
        taken = self._pool.allocate(fresh + must_copy)
        copies = [self._replace_last_block(taken.pop())] if must_copy else []
        self.blocks.extend(taken)
        self.length += count
        return copies

    def trim(self, length: int) -> None:
        """Forget all tokens behind the first `length` and release the blocks that held only such.

        `length` must be 0 or reach into the blocks that are held.
        """
        assert length == 0 or self.first == 0 or length >= self.gone
        self.first = self.first if length else 0
        kept = -(-length // self.block_size) - self.first
        for block in reversed(self.blocks[kept:]):
            self._pool.release(block)
        del self.blocks[kept:]
        self.length = length

    def release_last(self, number: int) -> None:
        """Release block `number` of the sequence if it is the last one; only to free the whole table."""
        if self.blocks and self.first + len(self.blocks) - 1 == number:
            self._pool.release(self.blocks.pop())

    def release_before(self, position: int) -> None:
        """Release the blocks that lie wholly before `position`, which is no larger than `length`, but for the kept."""
        count = position // self.block_size - self.first - self.kept
        if count > 0:
            for block in self.blocks[self.kept : self.kept + count]:
                self._pool.release(block)
            del self.blocks[self.kept : self.kept + count]
            self.first += count

    def attach(self, blocks: list[int], first: int, length: int) -> None:
        """Hold published `blocks` from block number `first` on, as the first `length` tokens of this empty table."""
        for block in blocks:
            self._pool.acquire(block)
        self.blocks, self.first, self.length = array("i", blocks), first, length

    def block(self, number: int) -> int:
        """The id of block `number` of the sequence, GONE where it has been released."""
        return GONE if self.kept <= number < self.kept + self.first else self.blocks[self._index(number)]

    def replace(self, number: int, block: int) -> None:
        """Hold `block`, which has the same contents, as block `number`."""
        self._pool.acquire(block)
        self._pool.release(self.blocks[self._index(number)])
        self.blocks[self._index(number)] = block

    def hold(self, block: int) -> None:
        """Hold one more block, whatever it holds."""
        self._pool.acquire(block)
        self.blocks.append(block)

    def take(self, count: int) -> list[int]:
        """Hold `count` new blocks besides. Raises OutOfBlocksError and takes none."""
        start = len(self.blocks)
        self.blocks.extend(self._pool.allocate(count))
        return list(self.blocks[start:])

    def fork(self, pool: Blocks | None = None) -> BlockTable:
        """Another table over the same blocks; nothing is copied before one of the two writes. `pool`: the same one, as
        the child shall see it.
        """
        child = BlockTable(pool or self._pool, self.block_size, self.rule)
        for block in self.blocks:
            child._pool.acquire(block)
        child.blocks = self.blocks[:]
        child.first, child.length = self.first, self.length
        return child

    def slot(self, position: int) -> int:
        """Where the token at `position` lies in the pool. Raises IndexError for one that has been released."""
        block, offset = divmod(position, self.block_size)
        if self.block(block) == GONE:
            raise IndexError(f"position {position} lies in a released block; {self.first} of the first are gone")
        return self.blocks[self._index(block)] * self.block_size + offset

    def last_slot(self) -> int:
        """Where the last token lies: what a decode step asks of every row."""
        return self.blocks[-1] * self.block_size + (self.length - 1) % self.block_size

    @property
    def gone(self) -> int:
        """The position behind the last one that has been released; 0 if none has been."""
        return (self.kept + self.first) * self.block_size if self.first else 0

    def _index(self, number: int) -> int:
        return number if number < self.kept else number - self.first

    def _replace_last_block(self, target: int) -> BlockCopy:
        source = self.blocks[-1]
        self._pool.release(source)
        self.blocks[-1] = target
        return BlockCopy(source, target)
