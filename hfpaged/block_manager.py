"""The block manager: sequences over one pool. It decides what to allocate; the pool keeps the counts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

from hfpaged.block_pool import BlockPool
from hfpaged.block_table import BlockCopy, Blocks, BlockTable
from hfpaged.errors import OutOfBlocksError, StreamPassedError, WindowPassedError
from hfpaged.layer_groups import visible_offset
from hfpaged.sequence import Sequence
from hfpaged.stream_rule import StreamRule


class TableCopy(NamedTuple):
    """A block table as it stood: see BlockTable."""

    blocks: array[int]
    first: int
    length: int


@dataclass
class TokenCounts:
    """Tokens that steps have stored so far: several of a sequence at once, as of prompts, and one at a time."""

    prefill: int = 0
    decode: int = 0


class BlockManager:
    """Creates, forks, grows, trims and frees sequences of `num_groups` block tables each.

    `windows` are those of the groups, None for a group of full attention; none at all: all are of that kind.
    """

    def __init__(
        self, pool: BlockPool, num_groups: int, block_size: int, windows: Many[int | None] | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.counts = TokenCounts()
        self._num_groups = num_groups
        self._windows = [(group, window) for group, window in enumerate(windows or ()) if window is not None]
        self._sequences: set[Sequence] = set()

    @property
    def has_windows(self) -> bool:
        return bool(self._windows)

    @property
    def sequences(self) -> list[Sequence]:
        """All that have been created and not freed, in no order."""
        return list(self._sequences)

    def copy_tables(self) -> list[list[TableCopy]]:
        """All tables, by layer group."""
        rows = [sequence.tables for sequence in self._sequences]
        return [
            [TableCopy(table.blocks[:], table.first, table.length) for table in tables]
            for tables in (zip(*rows, strict=True) if rows else [()] * self._num_groups)
        ]

    def create(self, rules: Many[StreamRule | None] | None = None) -> Sequence:
        """An empty sequence; it holds no block yet. `rules` by layer group, for one that forgets."""
        rules = rules or [None] * self._num_groups
        pool = self._pool_of_next()
        return self._keep(Sequence(tuple(BlockTable(pool, self.block_size, rule) for rule in rules)))

    def fork(self, parent: Sequence) -> Sequence:
        """A sequence that shares all blocks of `parent`; either copies a block only when it writes into it."""
        chain = parent.chain.fork() if parent.chain else None
        pool = self._pool_of_next()
        child = Sequence(tuple(table.fork(pool) for table in parent.tables), chain, parent.sinks)
        child.state = parent.state.fork() if parent.state else None
        return self._keep(child)

    def num_blocks_needed(self, growth: Many[tuple[Sequence, int]]) -> int:
        """How many free blocks `grow` would take, copies-on-write included."""
        needed = 0
        leaving: Counter[int] = Counter()  # holders of a shared block that copy it earlier in this very growth
        for sequence, count in growth:
            for table in sequence.tables:
                needed += table.num_new_blocks(count)
                if table.must_copy(count, leaving[table.blocks[-1]] if table.blocks else 0):
                    leaving[table.blocks[-1]] += 1
                    needed += 1
        return needed

    def can_surely_grow(self, growth: Many[tuple[Sequence, int]]) -> bool:
        """Whether there is room whatever lies where: a quick look that spares `num_blocks_needed`, as a rule."""
        most = sum(count for _, count in growth) // self.block_size + 2 * len(growth)
        return most * self._num_groups <= self.pool.num_free

    def can_grow(self, growth: Many[tuple[Sequence, int]]) -> bool:
        return self.num_blocks_needed(growth) <= self.pool.num_free

    def grow(self, growth: Many[tuple[Sequence, int]]) -> list[list[BlockCopy]]:
        """Make room for `count` more tokens in each (sequence, count): all of it, or OutOfBlocksError and none.

        A sequence stands in `growth` at most once. The copies that are returned, by layer group, must be made
        before the new slots are written.
        """
        if not self.can_surely_grow(growth):
            self._check_room(growth)
        copies: list[list[BlockCopy]] = [[] for _ in range(self._num_groups)]
        total = singles = 0
        for sequence, count in growth:
            total += count
            singles += count == 1
            for group, table in enumerate(sequence.tables):
                copies[group] += table.grow(count)
        self.counts.decode += singles
        self.counts.prefill += total - singles
        return copies

    def _check_room(self, growth: Many[tuple[Sequence, int]]) -> None:
        if not self.can_grow(growth):
            self._write_in_place(growth)
        needed = self.num_blocks_needed(growth)
        if needed > self.pool.num_free:
            raise OutOfBlocksError(needed, self.pool.num_free, self.pool.num_blocks)

    def _write_in_place(self, growth: Many[tuple[Sequence, int]]) -> None:
        """Blocks are short: of last blocks that nobody else holds no copy is kept for those who may look for it."""
        tables = [table for sequence, count in growth for table in sequence.tables if table.must_copy(count)]
        for block, holders in Counter(table.blocks[-1] for table in tables).items():
            if self.pool.is_published(block) and self.pool.refcount(block) == holders:
                self.pool.evict(block)

    def hold(self, copies: Many[Many[BlockCopy]]) -> Sequence:
        """Keep the sources of `copies` (by layer group) from being used again while storage copies them, layer by
        layer: a sequence to `free` when all have.
        """
        holder = self.create()
        for table, group in zip(holder.tables, copies, strict=True):
            for copy in group:
                table.hold(copy.source)
        return holder

    def release_left(self, sequences: Many[Sequence]) -> None:
        """Give back the blocks that lie wholly before what the next token of a sequence sees."""
        for group, window in self._windows:
            for sequence in sequences:
                table = sequence.tables[group]
                if table.rule is None:  # with a rule they go before the step that shall not see them
                    table.release_before(table.length - window + 1)

    def check_trim(self, sequence: Sequence, length: int) -> None:
        """Raises WindowPassedError where a token behind the first `length` would see tokens that are gone."""
        for table in sequence.tables if length else ():
            if table.rule and table.gone > visible_offset(length, table.rule.window):
                raise StreamPassedError(length, table.gone, table.rule.window)
        for group, window in self._windows if length else ():
            gone, seen = sequence.tables[group].gone, visible_offset(length, window)
            if gone > seen and sequence.tables[group].rule is None:
                raise WindowPassedError(length, seen, gone, window)

    def trim(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens of a sequence, for which `check_trim` must hold; none of one with a state."""
        if sequence.state and (not length or length < sequence.length):
            assert not length, "a state cannot go back"
            sequence.state.drop()
            sequence.state = None
        for table in sequence.tables:
            table.trim(length)
        if sequence.chain:
            sequence.chain.trim(length, self.block_size)
        if sequence.sinks:
            sequence.sinks = sequence.sinks.cut(length) if length else None

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence and forget it. Its tail goes first, through all layer groups, so that
        of a published prefix the end is evicted before the beginning.
        """
        self._sequences.remove(sequence)
        ends = {table.first + len(table.blocks) for table in sequence.tables}
        for number in range(max(ends, default=0) - 1, -1, -1) if len(sequence.tables) > 1 else ():
            for table in sequence.tables:
                table.release_last(number)
        self.trim(sequence, 0)

    def check_integrity(self) -> None:
        """Recount the pool against the tables of all sequences. Raises IntegrityError."""
        self.pool.check_integrity(table.blocks for sequence in self._sequences for table in sequence.tables)

    def _pool_of_next(self) -> Blocks:
        """The pool as the tables of the next sequence see it."""
        return self.pool

    def _keep(self, sequence: Sequence) -> Sequence:
        self._sequences.add(sequence)
        return sequence
