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


# Tables with a window


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_wholly_before_a_position_are_released_at_every_boundary(block_size):
    length = 3 * block_size + 1
    for position in (-1, *(p for p in boundaries(block_size) if p <= length), length):
        pool, table = table_of(length, block_size)
        before = table.blocks[:]
        table.release_before(position)
        assert table.first == max(position, 0) // block_size
        assert table.blocks == before[table.first :]
        assert table.length == length
        assert pool.num_used == len(table.blocks)
        pool.check_integrity([table.blocks])


def test_what_was_released_is_released_once():
    pool, table = table_of(13)
    for position in (8, 8, 3, 11):
        table.release_before(position)
        assert (table.first, len(table.blocks), pool.num_used) == (2, 2, 2)


def test_slots_of_what_is_held_stay_and_those_that_are_gone_are_an_error():
    _, table = table_of(13)
    slots = [table.slot(position) for position in range(13)]
    table.release_before(9)
    assert [table.slot(position) for position in range(8, 13)] == slots[8:]
    for position in (0, 7):
        with pytest.raises(IndexError, match=f"position {position} lies in a released block; 2 of the first"):
            table.slot(position)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_window_that_moves_on_forever_takes_no_more_blocks_than_it_spans(block_size):
    window, pool = 2 * block_size + 1, BlockPool(4)
    table = BlockTable(pool, block_size)
    for length in range(1, 12 * block_size):
        assert table.num_new_blocks(1) == int(length % block_size == 1 % block_size)
        table.grow(1)
        assert table.last_slot() == table.slot(length - 1)
        table.release_before(table.length - window + 1)
        assert len(table.blocks) * block_size <= window + 2 * block_size
        pool.check_integrity([table.blocks])
    assert pool.high_water <= 4


def test_a_table_whose_blocks_have_all_left_grows_on():
    _, table = table_of(8)
    table.release_before(8)  # a window of one token
    assert (table.first, len(table.blocks)) == (2, 0)
    assert not table.must_copy(1)
    assert table.num_new_blocks(5) == 2
    assert table.grow(5) == []
    assert table.slot(8) == table.blocks[0] * 4


def test_a_fork_of_what_is_held_releases_for_itself():
    pool, table = table_of(14)
    table.release_before(5)
    child = table.fork()
    assert (child.first, child.length, child.blocks) == (1, 14, table.blocks)
    child.release_before(9)
    assert pool.num_used == 3
    assert child.grow(1) == [BlockCopy(table.blocks[2], child.blocks[1])]
    pool.check_integrity([table.blocks, child.blocks])


@pytest.mark.parametrize("length", [8, 9, 12, 13])
def test_trimming_into_what_is_held_keeps_what_was_released_in_mind(length):
    pool, table = table_of(14)
    table.release_before(8)
    table.trim(length)
    assert (table.first, table.length, len(table.blocks)) == (2, length, -(-length // 4) - 2)
    table.grow(14 - length)
    assert (table.first, len(table.blocks)) == (2, 2)
    pool.check_integrity([table.blocks])


def test_a_table_trimmed_to_nothing_begins_anew():
    pool, table = table_of(14)
    table.release_before(9)
    table.trim(0)
    assert (table.first, table.length, pool.num_used) == (0, 0, 0)
    table.grow(5)
    assert table.slot(0) == table.blocks[0] * 4
