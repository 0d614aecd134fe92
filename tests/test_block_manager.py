from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.block_table import BlockCopy
from hfpaged.errors import IntegrityError, OutOfBlocksError, WindowPassedError
from hfpaged.pool_contents import count_tables


def manager_of(num_blocks=64, num_groups=1, block_size=4, windows=None):
    return BlockManager(BlockPool(num_blocks), num_groups, block_size, windows)


def tokens_by_group(manager):
    """As the statistics of a pool count them."""
    size = manager.pool.high_water
    return [count_tables(tables, manager.block_size, size)[1] for tables in manager.copy_tables()]


def tokens_in(manager):
    """Averaged over the layer groups."""
    counted = tokens_by_group(manager)
    return sum(counted) // len(counted)


def sequence_of(manager, length):
    sequence = manager.create()
    copies = manager.grow([(sequence, length)])
    assert copies == [[] for _ in sequence.tables]
    return sequence


def test_a_new_sequence_has_a_table_for_each_group_and_no_block():
    manager = manager_of(num_groups=3)
    sequence = manager.create()
    assert [len(table.blocks) for table in sequence.tables] == [0, 0, 0]
    assert sequence.length == 0
    assert manager.pool.num_used == 0
    manager.check_integrity()


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_group_grows_alike_at_every_boundary(block_size, num_groups):
    for length in sorted({max(k * block_size + d, 0) for k in range(3) for d in (-1, 0, 1)}):
        manager = manager_of(num_groups=num_groups, block_size=block_size)
        sequence = manager.create()
        needed = num_groups * ((length + block_size - 1) // block_size)
        assert manager.num_blocks_needed([(sequence, length)]) == needed
        manager.grow([(sequence, length)])
        assert manager.pool.num_used == needed
        assert {table.length for table in sequence.tables} == {length}
        assert sequence.length == length
        manager.check_integrity()


def test_forked_sequence_copies_only_the_block_it_writes():
    manager = manager_of(num_groups=2)
    parent = sequence_of(manager, 10)
    child = manager.fork(parent)
    assert manager.pool.num_used == 6
    copies = manager.grow([(child, 1)])
    assert copies == [
        [BlockCopy(mine.blocks[2], its.blocks[2])] for mine, its in zip(parent.tables, child.tables, strict=True)
    ]
    assert manager.pool.num_used == 8
    assert all(c.blocks[:2] == p.blocks[:2] for c, p in zip(child.tables, parent.tables, strict=True))
    manager.check_integrity()


@pytest.mark.parametrize("holders", [1, 2, 3, 5])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_k_holders_of_a_last_block_make_k_minus_1_copies_when_all_grow(holders, num_groups):
    manager = manager_of(num_groups=num_groups)
    first = sequence_of(manager, 6)
    last = [table.blocks[-1] for table in first.tables]
    family = [first] + [manager.fork(first) for _ in range(holders - 1)]
    growth = [(sequence, 1) for sequence in family]
    assert manager.num_blocks_needed(growth) == num_groups * (holders - 1)
    copies = manager.grow(growth)
    for group in range(num_groups):
        assert [copy.source for copy in copies[group]] == [last[group]] * (holders - 1)
        assert len({sequence.tables[group].blocks[-1] for sequence in family}) == holders
        assert len({sequence.tables[group].blocks[0] for sequence in family}) == 1
    assert family[-1].tables[0].blocks[-1] == last[0]  # the last writer keeps the block
    manager.check_integrity()


def test_a_holder_that_does_not_grow_makes_all_that_do_copy():
    manager = manager_of()
    first = sequence_of(manager, 6)
    second, third = manager.fork(first), manager.fork(first)
    growth = [(first, 0), (second, 1), (third, 1)]
    assert manager.num_blocks_needed(growth) == 2
    assert [copy.source for copy in manager.grow(growth)[0]] == [first.tables[0].blocks[1]] * 2
    manager.check_integrity()


def test_forks_of_whole_blocks_grow_without_copies():
    manager = manager_of()
    parent = sequence_of(manager, 8)
    child = manager.fork(parent)
    assert manager.num_blocks_needed([(parent, 1), (child, 1)]) == 2
    assert manager.grow([(parent, 1), (child, 1)]) == [[]]
    assert parent.tables[0].blocks[:2] == child.tables[0].blocks[:2]
    assert parent.tables[0].blocks[2] != child.tables[0].blocks[2]
    manager.check_integrity()


def test_out_of_blocks_takes_nothing_from_anyone_and_says_the_numbers():
    manager = manager_of(num_blocks=8, num_groups=2)
    first = sequence_of(manager, 6)
    second = manager.fork(first)
    before = [[list(table.blocks) for table in sequence.tables] for sequence in (first, second)]
    growth = [(first, 1), (second, 7)]  # 2 copies, and 2 new blocks for each group of the second one
    assert not manager.can_grow(growth)
    with pytest.raises(OutOfBlocksError, match=r"6 more blocks are needed, 4 of the pool's 8") as caught:
        manager.grow(growth)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (6, 4, 8)
    assert [[list(table.blocks) for table in s.tables] for s in (first, second)] == before
    assert first.length == second.length == 6
    assert manager.pool.num_free == 4
    manager.check_integrity()
    assert manager.can_grow([(first, 1), (second, 6)])
    manager.grow([(first, 1), (second, 6)])
    assert manager.pool.num_free == 0
    manager.check_integrity()


def test_trim_keeps_the_first_tokens_and_gives_the_rest_back():
    manager = manager_of(num_groups=2)
    sequence = sequence_of(manager, 13)
    kept = [list(table.blocks[:2]) for table in sequence.tables]
    manager.trim(sequence, 5)
    assert sequence.length == 5
    assert [list(table.blocks) for table in sequence.tables] == kept
    assert manager.pool.num_used == 4
    manager.check_integrity()


def test_free_gives_back_all_blocks_but_those_that_others_hold():
    manager = manager_of()
    parent = sequence_of(manager, 10)
    child = manager.fork(parent)
    manager.grow([(child, 3)])
    manager.free(parent)
    assert manager.pool.num_used == 4
    assert manager.pool.stats.shared == 0
    manager.check_integrity()
    manager.free(child)
    assert manager.pool.num_used == 0
    manager.check_integrity()


def test_a_sequence_is_freed_once():
    manager = manager_of()
    sequence = sequence_of(manager, 3)
    manager.free(sequence)
    with pytest.raises(KeyError):
        manager.free(sequence)


def test_tokens_of_shared_blocks_count_once():
    manager = manager_of(num_groups=2)
    parent = sequence_of(manager, 10)
    child = manager.fork(parent)
    assert tokens_in(manager) == 10
    manager.grow([(child, 1)])  # the block of tokens 8 and 9 lies there twice now
    assert tokens_in(manager) == 10 + 3
    manager.trim(child, 6)
    assert tokens_in(manager) == 10
    manager.free(parent)
    assert tokens_in(manager) == 6


def test_a_block_counts_as_full_as_its_longest_holder_fills_it():
    manager = manager_of()
    parent = sequence_of(manager, 4)
    child = manager.fork(parent)
    manager.trim(parent, 1)
    assert tokens_in(manager) == 4
    manager.trim(child, 2)
    assert tokens_in(manager) == 2


def test_sources_that_are_held_are_not_handed_out_until_the_holder_is_freed():
    manager = manager_of(num_blocks=8, num_groups=2)
    parent = sequence_of(manager, 6)
    child = manager.fork(parent)
    copies = manager.grow([(child, 1)])
    holder = manager.hold(copies)
    sources = [copy.source for group in copies for copy in group]
    manager.free(parent)
    manager.check_integrity()
    assert [manager.pool.refcount(source) for source in sources] == [1, 1]
    assert manager.pool.num_free == 2
    assert not set(manager.pool.allocate(2)) & set(sources)
    manager.free(holder)
    assert manager.pool.num_free == 2
    assert set(manager.pool.allocate(2)) == set(sources)


def test_a_source_of_several_copies_is_held_once_for_each():
    manager = manager_of()
    first = sequence_of(manager, 6)
    last = first.tables[0].blocks[-1]
    family = [first, manager.fork(first), manager.fork(first)]
    holder = manager.hold(manager.grow([(sequence, 1) for sequence in family]))
    assert manager.pool.refcount(last) == 3  # the last writer keeps it
    manager.check_integrity()
    manager.free(holder)
    assert manager.pool.refcount(last) == 1
    manager.check_integrity()


def test_sources_that_are_held_hold_no_tokens():
    manager = manager_of(num_groups=2)
    parent = sequence_of(manager, 6)
    child = manager.fork(parent)
    manager.hold(manager.grow([(child, 1)]))
    before = tokens_in(manager)
    manager.free(parent)
    assert (before, tokens_in(manager)) == (4 + 2 + 3, 4 + 3)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 8, 9, 12, 13, 14, 30])
def test_only_groups_with_a_window_release_and_only_what_the_next_token_does_not_see(length):
    manager = manager_of(num_groups=3, windows=[None, 6, 1])
    sequence = sequence_of(manager, length)
    manager.release_left([sequence])
    assert [table.first for table in sequence.tables] == [0, max(length - 5, 0) // 4, length // 4]
    assert {table.length for table in sequence.tables} == {length}
    manager.check_integrity()


def test_without_windows_nothing_is_released():
    manager = manager_of(num_groups=2, windows=[None, None])
    sequence = sequence_of(manager, 30)
    manager.release_left([sequence])
    assert (manager.has_windows, manager.pool.num_used) == (False, 16)
    assert manager_of(windows=[5]).has_windows


def test_a_released_block_goes_on_to_serve_who_shares_it():
    manager = manager_of(windows=[6])
    parent = sequence_of(manager, 16)
    child = manager.fork(parent)
    manager.release_left([child])
    assert (manager.pool.num_used, manager.pool.stats.shared) == (4, 2)
    manager.release_left([parent])
    assert (manager.pool.num_used, manager.pool.stats.shared) == (2, 2)
    manager.check_integrity()


@pytest.mark.parametrize("length", range(17))
def test_a_trim_must_leave_what_the_next_token_sees(length):
    manager = manager_of(num_groups=2, windows=[None, 6])
    sequence = sequence_of(manager, 16)
    manager.release_left([sequence])  # the first 8 tokens
    if 0 < length < 13:
        with pytest.raises(WindowPassedError, match=f"cut to {length} tokens needs those from {max(length - 5, 0)} on"):
            manager.check_trim(sequence, length)
    else:
        manager.check_trim(sequence, length)
        manager.trim(sequence, length)
        assert sequence.length == length
    manager.check_integrity()


def test_tokens_are_counted_by_group_and_those_that_went_no_more():
    manager = manager_of(num_groups=2, windows=[None, 6])
    sequence = sequence_of(manager, 15)
    manager.release_left([sequence])
    assert tokens_by_group(manager) == [15, 15 - 8]
    assert tokens_in(manager) == 11


@pytest.mark.parametrize("corrupt", ["length", "block", "release"])
def test_books_that_do_not_agree_with_the_tables_are_found(corrupt):
    manager = manager_of()
    table = sequence_of(manager, 10).tables[0]
    manager.check_integrity()
    if corrupt == "block":
        table.blocks[0] = table.blocks[1]
    elif corrupt == "release":
        manager.pool.release(table.blocks[0])
    else:
        del table.blocks[-1]
    with pytest.raises(IntegrityError):
        manager.check_integrity()


class ManagerMachine(RuleBasedStateMachine):
    """Sequences over one pool against plain lists of tokens. What a storage would hold is played by a dict
    from slots to tokens, with the copies made as `grow` returns them; each sequence must read back its own.
    """

    @initialize(
        num_blocks=st.integers(1, 40),
        windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
        block_size=st.sampled_from([1, 2, 4, 8]),
    )
    def make(self, num_blocks, windows, block_size):
        num_groups = len(windows)
        self.windows = windows
        self.manager = BlockManager(BlockPool(num_blocks), num_groups, block_size, windows)
        self.num_groups, self.block_size = num_groups, block_size
        self.memory: dict[int, tuple[int, int]] = {}  # slot -> (group, token)
        self.tokens: dict[object, list[int]] = {}  # sequence -> its tokens
        self.names = itertools.count()

    def some_sequence(self, data):
        sequences = list(self.tokens)
        return sequences[data.draw(st.integers(0, len(sequences) - 1))]

    @precondition(lambda self: len(self.tokens) < 8)
    @rule()
    def create(self):
        self.tokens[self.manager.create()] = []

    @precondition(lambda self: 0 < len(self.tokens) < 8)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.some_sequence(data)
        used = self.manager.pool.num_used
        self.tokens[self.manager.fork(parent)] = list(self.tokens[parent])
        assert self.manager.pool.num_used == used

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def grow(self, data):
        sequences = list(self.tokens)
        order = data.draw(st.permutations(range(len(sequences))))
        chosen = order[: data.draw(st.integers(1, len(order)))]
        growth = [(sequences[i], data.draw(st.integers(0, 2 * self.block_size + 1))) for i in chosen]
        pool = self.manager.pool
        needed, free = self.manager.num_blocks_needed(growth), pool.num_free
        assert self.manager.can_grow(growth) == (needed <= free)
        if needed > free:
            before = [[list(t.blocks) for t in s.tables] for s in sequences]
            with pytest.raises(OutOfBlocksError) as caught:
                self.manager.grow(growth)
            assert (caught.value.needed, caught.value.free, caught.value.total) == (
                needed,
                free,
                pool.num_blocks,
            )
            assert [[list(t.blocks) for t in s.tables] for s in sequences] == before
            return
        copies = self.manager.grow(growth)
        assert free - pool.num_free == needed
        self.copy(copies)
        for sequence, count in growth:
            self.write(sequence, [next(self.names) for _ in range(count)])

    def copy(self, copies):
        assert len(copies) == self.num_groups
        for copy in itertools.chain.from_iterable(copies):
            for offset in range(self.block_size):
                source, target = (b * self.block_size + offset for b in (copy.source, copy.target))
                if source in self.memory:
                    self.memory[target] = self.memory[source]

    def write(self, sequence, new):
        start = len(self.tokens[sequence])
        for group, table in enumerate(sequence.tables):
            for position, token in enumerate(new, start):
                self.memory[table.slot(position)] = (group, token)
        self.tokens[sequence] += new

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def trim(self, data):
        sequence = self.some_sequence(data)
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        visible = [0 if window is None else max(length - window + 1, 0) for window in self.windows]
        held = [table.first * self.block_size for table in sequence.tables]
        if length and any(first > seen for first, seen in zip(held, visible, strict=True)):
            with pytest.raises(WindowPassedError):
                self.manager.check_trim(sequence, length)
            return
        self.manager.check_trim(sequence, length)
        self.manager.trim(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release_left(self, data):
        sequence = self.some_sequence(data)
        self.manager.release_left([sequence])
        for window, table in zip(self.windows, sequence.tables, strict=True):
            assert table.first == (max(table.length - window + 1, 0) // self.block_size if window else 0)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.some_sequence(data)
        self.manager.free(sequence)
        del self.tokens[sequence]

    @invariant()
    def every_sequence_reads_back_its_own_tokens(self):
        self.manager.check_integrity()
        for sequence, tokens in self.tokens.items():
            assert sequence.length == len(tokens)
            for group, table in enumerate(sequence.tables):
                assert table.length == len(tokens)
                assert len(table.blocks) == -(-len(tokens) // self.block_size) - table.first
                gone = table.first * self.block_size
                assert gone <= max(len(tokens) - (self.windows[group] or len(tokens) + 1) + 1, 0)
                read = [self.memory[table.slot(position)] for position in range(gone, len(tokens))]
                assert read == [(group, token) for token in tokens[gone:]]

    @invariant()
    def blocks_are_shared_only_inside_of_a_group(self):
        by_group = [
            {block for sequence in self.tokens for block in sequence.tables[group].blocks}
            for group in range(self.num_groups)
        ]
        assert len(set().union(*by_group)) == sum(map(len, by_group)) == self.manager.pool.num_used

    @invariant()
    def tokens_are_counted_by_the_slots_that_they_fill(self):
        slots = {
            table.slot(position)
            for sequence in self.tokens
            for table in sequence.tables
            for position in range(table.first * self.block_size, table.length)
        }
        assert tokens_in(self.manager) == len(slots) // self.num_groups

    def teardown(self):
        for sequence in getattr(self, "tokens", {}):
            self.manager.free(sequence)
        if hasattr(self, "manager"):
            assert self.manager.pool.num_used == 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
