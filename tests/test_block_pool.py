from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hfpaged.block_pool import BlockPool, PoolStats
from hfpaged.errors import IntegrityError, OutOfBlocksError


def test_a_new_pool_is_all_free_and_has_handed_out_nothing():
    pool = BlockPool(5)
    assert pool.stats == PoolStats(total=5, used=0, shared=0)
    assert (pool.stats.free, pool.num_free, pool.num_used, pool.high_water) == (5, 5, 0, 0)
    assert [pool.refcount(block) for block in range(5)] == [0] * 5


def test_fresh_blocks_come_in_order_with_one_holder_each():
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) == [2]
    assert [pool.refcount(block) for block in range(5)] == [1, 1, 1, 0, 0]
    assert pool.high_water == 3
    pool.check_integrity([[0, 1], [2]])


def test_released_blocks_are_handed_out_before_fresh_ones():
    pool = BlockPool(10)
    pool.allocate(4)
    pool.release(1)
    pool.release(3)
    assert sorted(pool.allocate(2)) == [1, 3]
    assert pool.high_water == 4
    pool.release(0)
    assert pool.allocate(3) == [0, 4, 5]
    assert pool.high_water == 6
    pool.check_integrity([range(6)])


def test_high_water_stays_while_blocks_go_and_come_again():
    pool = BlockPool(100)
    for _ in range(20):
        for block in pool.allocate(3):
            pool.release(block)
    assert pool.high_water == 3
    assert pool.num_free == 100


def test_too_many_blocks_take_nothing_and_the_error_has_the_numbers():
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocksError, match=r"^2 more blocks .* 1 of the pool's 4 are free\.") as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (2, 1, 4)
    assert pool.stats == PoolStats(total=4, used=3, shared=0)
    assert pool.high_water == 3
    pool.check_integrity([held])
    assert pool.allocate(1) == [3]


def test_the_very_last_block_can_be_taken_and_zero_blocks_always():
    pool = BlockPool(3)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.num_free == 0
    assert pool.allocate(0) == []
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_a_shared_block_comes_back_with_its_last_holder_only():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.acquire(block)
    assert pool.refcount(block) == 3
    assert pool.stats == PoolStats(total=2, used=1, shared=1)
    pool.release(block)
    assert pool.stats.shared == 1
    pool.release(block)
    assert pool.stats == PoolStats(total=2, used=1, shared=0)
    pool.release(block)
    assert pool.stats == PoolStats(total=2, used=0, shared=0)
    assert pool.refcount(block) == 0


@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_a_free_block_is_neither_acquired_nor_released(verb):
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release(block)
    for free in (block, 2):  # one that came back, one that was never handed out
        with pytest.raises(IntegrityError, match=f"block {free} was {verb}d while it is free"):
            getattr(pool, verb)(free)
    pool.check_integrity([])
    assert pool.num_free == 3


def test_integrity_holds_for_the_tables_that_exist_and_for_no_others():
    pool = BlockPool(4)
    pool.allocate(2)
    pool.acquire(1)
    pool.check_integrity([[0, 1], [1]])
    with pytest.raises(IntegrityError, match=r"\{1: \(2, 1\)\}"):
        pool.check_integrity([[0, 1]])
    with pytest.raises(IntegrityError, match=r"\{0: \(1, 2\)\}"):
        pool.check_integrity([[0, 1], [1], [0]])


def corrupt_refcount(pool):
    pool._refcounts[0] += 1


def leak_a_free_block(pool):
    pool._released.pop()


def free_a_block_twice(pool):
    pool._released.append(pool._released[0])


def free_a_block_in_use(pool):
    pool._released.append(0)


def miscount_shared(pool):
    pool._num_shared += 1


def shrink_below_what_is_out(pool):
    pool.num_blocks = 2


CORRUPTIONS = [
    corrupt_refcount,
    leak_a_free_block,
    free_a_block_twice,
    free_a_block_in_use,
    miscount_shared,
    shrink_below_what_is_out,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda function: function.__name__)
def test_corrupted_books_are_found(corrupt):
    pool = BlockPool(4)
    pool.allocate(3)
    pool.acquire(1)
    pool.release(2)
    tables = [[0, 1], [1]]
    pool.check_integrity(tables)
    corrupt(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity(tables)


@pytest.mark.parametrize("block", [-1, 1, 2, 4, 100])
def test_a_table_with_a_block_that_was_never_handed_out_is_an_integrity_error(block):
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match=f"holds block {block}; only 1 were ever handed out"):
        pool.check_integrity([[0], [block]])


# Published blocks


def pool_with_cached(count, num_blocks=4):
    """A pool whose first `count` blocks are published and held by nobody, 0 the longest."""
    pool = BlockPool(num_blocks)
    evicted = []
    pool.on_evict = evicted.append
    for block in pool.allocate(count):
        pool.publish(block)
    for block in range(count):
        pool.release(block)
    return pool, evicted


def test_a_published_block_is_cached_when_its_last_holder_goes_and_counts_as_free():
    pool, evicted = pool_with_cached(2)
    assert pool.stats == PoolStats(total=4, used=0, shared=0, cached=2)
    assert (pool.num_free, pool.num_cached, evicted) == (4, 2, [])
    pool.acquire(0)
    assert pool.stats == PoolStats(total=4, used=1, shared=0, cached=1)
    pool.check_integrity([[0]])


def test_the_least_recently_released_is_evicted_when_nothing_else_is_left_and_no_more():
    pool, evicted = pool_with_cached(3)
    pool.acquire(0)
    pool.release(0)
    assert pool.allocate(1) == [3]
    assert evicted == []
    assert pool.allocate(2) == evicted == [1, 2]
    assert pool.published() == {0}
    pool.check_integrity([[3, 1, 2]])


def test_a_block_that_was_evicted_is_published_no_longer():
    pool, _ = pool_with_cached(1, num_blocks=1)
    assert pool.allocate(1) == [0]
    assert not pool.is_published(0)
    pool.release(0)
    assert pool.stats == PoolStats(total=1, used=0, shared=0)


def test_no_more_than_max_cached_are_kept():
    pool = BlockPool(9)
    pool.max_cached = 2
    evicted = []
    pool.on_evict = evicted.append
    for block in pool.allocate(5):
        pool.publish(block)
    for block in (4, 2, 0, 1, 3):
        pool.release(block)
    assert (evicted, pool.num_cached) == ([4, 2, 0], 2)
    pool.check_integrity([])


def test_withdrawn_and_evicted_blocks_in_use_are_free_when_they_are_released():
    pool, evicted = pool_with_cached(2)
    pool.acquire(0)
    pool.acquire(1)
    pool.withdraw(0)
    pool.evict(1)
    assert (evicted, pool.published()) == ([1], set())
    pool.release(0)
    pool.release(1)
    assert pool.num_cached == 0
    pool.check_integrity([])


def test_dropping_the_cached_blocks_leaves_those_in_use():
    pool, evicted = pool_with_cached(3)
    pool.acquire(1)
    assert pool.drop_cached() == 2
    assert sorted(evicted) == [0, 2]
    assert pool.published() == {1}
    assert pool.drop_cached() == 0
    pool.check_integrity([[1]])


def test_a_large_pool_drops_all_that_is_cached_at_once():
    """No step is made meanwhile: it takes 0.2 s, and no 20."""
    pool, evicted = pool_with_cached(100_000, num_blocks=100_000)
    assert pool.drop_cached() == 100_000
    assert evicted == list(range(100_000))


def test_a_free_block_cannot_be_published():
    pool = BlockPool(2)
    for block in (0, 1):
        with pytest.raises(IntegrityError, match=f"block {block} was published while it is free"):
            pool.publish(block)


@pytest.mark.parametrize("corrupt", ["cached", "released"])
def test_books_of_published_blocks_that_disagree_are_found(corrupt):
    pool, _ = pool_with_cached(2)
    pool.allocate(2)
    pool.release(2)
    tables = [[3]]
    pool.check_integrity(tables)
    if corrupt == "cached":
        pool._published.remove(0)
    else:
        pool._published.add(2)
    with pytest.raises(IntegrityError, match="published"):
        pool.check_integrity(tables)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a multiset of holders."""

    @initialize(num_blocks=st.integers(0, 12))
    def make(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.held: Counter[int] = Counter()
        self.most = 0  # the most blocks that were ever in use at once

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        before = set(self.held)
        free = self.pool.num_blocks - len(before)
        if count > free:
            with pytest.raises(OutOfBlocksError) as caught:
                self.pool.allocate(count)
            assert (caught.value.needed, caught.value.free, caught.value.total) == (
                count,
                free,
                self.pool.num_blocks,
            )
            return
        taken = self.pool.allocate(count)
        assert len(taken) == len(set(taken)) == count
        assert not before & set(taken)
        self.held.update(taken)
        self.most = max(self.most, len(self.held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def acquire(self, data):
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.acquire(block)
        self.held[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(block)
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]

    @rule(data=st.data(), verb=st.sampled_from(["acquire", "release"]))
    def refuse_a_free_block(self, data, verb):
        free = sorted(set(range(self.pool.num_blocks)) - set(self.held))
        if free:
            with pytest.raises(IntegrityError):
                getattr(self.pool, verb)(data.draw(st.sampled_from(free)))

    @invariant()
    def books_agree(self):
        self.pool.check_integrity([list(self.held.elements())])
        assert self.pool.num_used == len(self.held)
        assert self.pool.num_free == self.pool.num_blocks - len(self.held)
        assert self.pool.stats.shared == sum(count > 1 for count in self.held.values())
        assert all(self.pool.refcount(block) == self.held[block] for block in range(self.pool.num_blocks))
        # Released ids first: the largest id that was handed out is never above what was needed at once.
        assert self.pool.high_water == self.most


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(
    tables=st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True), min_size=1, max_size=5),
    own=st.integers(0, 3),
)
def test_what_somebody_holds_is_told_with_what_he_bears_of_it(tables, own):
    pool = BlockPool(10)
    ids = pool.allocate(10)
    for table in tables:
        for block in table:
            pool.acquire(block)
    for block in ids:  # those that allocated them let go
        pool.release(block)
    mine = tables[: own + 1]
    count, shared, part = pool.holding(mine)
    held = [block for table in mine for block in table]
    assert count == len(set(held))
    assert shared == sum(pool.refcount(block) > held.count(block) for block in set(held))
    assert part == pytest.approx(sum(held.count(block) / pool.refcount(block) for block in set(held)))
    if len(mine) == len(tables):
        assert part == pytest.approx(pool.num_used)
