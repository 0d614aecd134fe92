from __future__ import annotations

import pytest

from hfpaged.block_pool import BlockPool
from hfpaged.block_table import BlockCopy, BlockTable
from hfpaged.errors import OutOfBlocksError

BLOCK_SIZES = [1, 4, 16]


def table_of(length, block_size=4, num_blocks=64):
    pool = BlockPool(num_blocks)
    table = BlockTable(pool, block_size)
    assert table.grow(length) == []
    return pool, table


def boundaries(block_size):
    return sorted({max(k * block_size + d, 0) for k in range(4) for d in (-1, 0, 1)})


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_table_holds_just_enough_blocks_at_every_boundary(block_size):
    for length in boundaries(block_size):
        pool, table = table_of(length, block_size)
        assert table.length == length
        assert len(table.blocks) == pool.num_used == (length + block_size - 1) // block_size
        pool.check_integrity([table.blocks])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_growing_token_by_token_takes_a_block_only_when_one_is_full(block_size):
    pool, table = table_of(0, block_size)
    for length in range(1, 3 * block_size + 2):
        before = pool.num_used
        assert table.num_new_blocks(1) == (length % block_size == 1 % block_size)
        assert table.grow(1) == []
        assert pool.num_used - before == (length % block_size == 1 % block_size)
        assert table.length == length


def test_growing_by_nothing_changes_nothing():
    pool, table = table_of(5)
    child = table.fork()
    assert not child.must_copy(0)
    assert child.grow(0) == []
    assert child.blocks == table.blocks
    pool.check_integrity([table.blocks, child.blocks])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_slots_are_block_times_size_plus_offset_and_all_distinct(block_size):
    pool = BlockPool(64)
    first, second = BlockTable(pool, block_size), BlockTable(pool, block_size)
    for _ in range(3 * block_size):  # in turns, so that the blocks of the two interleave
        first.grow(1)
        second.grow(1)
    slots = {}
    for table in (first, second):
        for position in range(table.length):
            slot = table.slot(position)
            assert slot // block_size == table.blocks[position // block_size]
            assert slot % block_size == position % block_size
            slots[slot] = (table, position)
    assert len(slots) == 6 * block_size


def test_a_fork_shares_every_block_and_copies_none():
    pool, table = table_of(10)
    child = table.fork()
    assert child.blocks == table.blocks
    assert child.length == 10
    assert pool.num_used == pool.stats.shared == 3
    assert [pool.refcount(block) for block in table.blocks] == [2, 2, 2]
    pool.check_integrity([table.blocks, child.blocks])


def test_a_fork_has_a_list_of_blocks_of_its_own():
    pool, table = table_of(8)
    child = table.fork()
    child.grow(1)
    assert len(table.blocks) == 2
    assert len(child.blocks) == 3
    pool.check_integrity([table.blocks, child.blocks])


def test_a_fork_copies_only_the_block_that_it_writes():
    pool, table = table_of(10)
    child = table.fork()
    assert child.must_copy(1)
    assert child.grow(1) == [BlockCopy(source=table.blocks[2], target=child.blocks[2])]
    assert child.blocks[:2] == table.blocks[:2]
    assert child.blocks[2] != table.blocks[2]
    assert pool.stats.shared == 2
    assert not table.must_copy(1)  # its last block is its own again
    assert table.grow(1) == []
    pool.check_integrity([table.blocks, child.blocks])


def test_the_parent_copies_as_well_when_it_writes_first():
    pool, table = table_of(10)
    child = table.fork()
    last = table.blocks[2]
    assert table.grow(1) == [BlockCopy(last, table.blocks[2])]
    assert child.blocks[2] == last
    assert child.grow(1) == []
    pool.check_integrity([table.blocks, child.blocks])


def test_full_blocks_are_never_copied():
    pool, table = table_of(8)
    child = table.fork()
    assert not child.must_copy(5)
    assert child.grow(5) == []
    assert child.blocks[:2] == table.blocks
    pool.check_integrity([table.blocks, child.blocks])


def test_must_copy_reckons_with_holders_that_have_let_go():
    pool, table = table_of(5)
    child, grandchild = table.fork(), table.fork()
    assert pool.refcount(table.blocks[-1]) == 3
    assert [child.must_copy(1, released=count) for count in range(3)] == [True, True, False]
    pool.check_integrity([table.blocks, child.blocks, grandchild.blocks])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_trimming_releases_the_blocks_behind_at_every_boundary(block_size):
    for length in boundaries(block_size):
        pool, table = table_of(3 * block_size + 1, block_size)
        before = table.blocks[:]
        kept = min(length, table.length)
        table.trim(kept)
        assert table.length == kept
        assert table.blocks == before[: (kept + block_size - 1) // block_size]
        assert pool.num_used == len(table.blocks)
        pool.check_integrity([table.blocks])


def test_trimming_a_fork_leaves_the_blocks_to_the_other_holder():
    pool, table = table_of(10)
    child = table.fork()
    child.trim(0)
    assert len(child.blocks) == child.length == 0
    assert pool.num_used == 3
    assert pool.stats.shared == 0
    pool.check_integrity([table.blocks])


def test_writing_again_after_a_trim_into_a_shared_block_copies_that_block():
    pool, table = table_of(8)
    child = table.fork()
    child.trim(7)  # back into the second block, which was full
    assert child.must_copy(1)
    assert child.grow(1) == [BlockCopy(table.blocks[1], child.blocks[1])]
    pool.check_integrity([table.blocks, child.blocks])


def test_trimmed_blocks_are_the_next_ones_to_be_used():
    pool, table = table_of(12)
    gone = list(table.blocks[1:])
    table.trim(4)
    other = BlockTable(pool, 4)
    other.grow(8)
    assert sorted(other.blocks) == gone
    assert pool.high_water == 3


def test_a_table_that_cannot_grow_stays_as_it_was_and_the_error_says_the_numbers():
    pool, table = table_of(6, num_blocks=3)
    with pytest.raises(OutOfBlocksError, match=r"2 more blocks are needed, 1 of the pool's 3"):
        table.grow(7)
    assert (table.length, len(table.blocks), pool.num_free) == (6, 2, 1)
    pool.check_integrity([table.blocks])
    assert table.grow(6) == []


def test_a_fork_that_cannot_even_copy_stays_as_it_was():
    pool, table = table_of(6, num_blocks=2)
    child = table.fork()
    with pytest.raises(OutOfBlocksError, match=r"1 more blocks are needed, 0 of the pool's 2"):
        child.grow(1)
    assert child.blocks == table.blocks
    assert child.length == 6
    pool.check_integrity([table.blocks, child.blocks])


@pytest.mark.parametrize("count", [7, 10])
def test_a_fork_that_can_copy_but_not_grow_stays_as_it_was(count):
    pool, table = table_of(2, num_blocks=3)
    child = table.fork()
    with pytest.raises(OutOfBlocksError, match=rf"{1 + (count + 1) // 4} more blocks are needed, 2 of the pool's 3"):
        child.grow(count)  # a copy would fit, the new blocks do not
    assert child.blocks == table.blocks
    assert (child.length, pool.num_free) == (2, 2)
    pool.check_integrity([table.blocks, child.blocks])


def test_a_fork_that_copies_and_grows_at_once_has_its_blocks_in_order():
    pool, table = table_of(6)
    child = table.fork()
    (copy,) = child.grow(7)
    assert copy == BlockCopy(source=table.blocks[1], target=child.blocks[1])
    assert child.blocks[0] == table.blocks[0]
    assert len(set(child.blocks[1:]) - set(table.blocks)) == len(child.blocks) - 1 == 3
    pool.check_integrity([table.blocks, child.blocks])
