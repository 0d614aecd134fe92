from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.block_table import GONE, BlockTable
from hfpaged.errors import StreamPassedError
from hfpaged.layer_groups import LayerGroup
from hfpaged.stream_rule import SinkTokens, StreamRule, chunk_size, stream_rules

SIZE = 4


@given(
    st.integers(1, 20),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["grow", "release", "fork"]), st.integers(0, 9))),
)
def test_a_table_holds_its_first_blocks_and_those_that_its_window_reaches(window, kept, changes):
    pool = BlockPool(1000)
    table, everything = BlockTable(pool, SIZE, StreamRule(window, kept)), []
    forks, gone = [], set()
    for change, count in changes:
        if change == "grow":
            table.grow(count)
            have = len(everything)
            everything += [table.slot(position) for position in range(have, table.length)]
            if count:
                everything[have // SIZE * SIZE : have] = [
                    table.slot(position) if table.block(position // SIZE) != GONE else -1
                    for position in range(have // SIZE * SIZE, have)
                ]  # copied on write
        elif change == "release":
            edge = table.length - window + 1
            table.release_before(edge)
            gone |= set(range(kept, max(edge // SIZE, kept)))
        else:
            forks.append(table.fork())
        pool.check_integrity([table.blocks, *(fork.blocks for fork in forks)])
        assert table.gone == (max(gone) + 1 if gone else 0) * SIZE
        assert len(table.blocks) == -(-table.length // SIZE) - len(gone)
        for position, slot in enumerate(everything):
            if position // SIZE in gone:
                assert table.block(position // SIZE) == GONE
                with pytest.raises(IndexError, match="released block"):
                    table.slot(position)
            else:
                assert table.slot(position) == slot
                assert table.block(position // SIZE) == slot // SIZE
    for each in (table, *forks):
        each.trim(0)
        assert (each.first, each.length, len(each.blocks)) == (0, 0, 0)
    assert pool.num_used == 0


def streamed(length, window=6, kept=1):
    """(manager, a sequence of two groups, one of which forgets)."""
    manager = BlockManager(BlockPool(100), 2, SIZE, [None, 9])
    sequence = manager.create([StreamRule(window, kept), None])
    manager.grow([(sequence, length)])
    sequence.tables[0].release_before(length - window + 1)
    return manager, sequence


def test_a_kept_block_can_be_put_in_the_place_of_another():
    manager, sequence = streamed(23)
    table = sequence.tables[0]
    assert [table.block(number) for number in range(6)] == [0, GONE, GONE, GONE, 4, 5]
    new = manager.create()
    manager.grow([(new, SIZE)])
    table.replace(0, new.tables[0].blocks[0])
    manager.free(new)
    assert table.slot(2) == table.block(0) * SIZE + 2
    manager.check_integrity()
    manager.free(sequence)
    manager.check_integrity()
    assert manager.pool.num_used == 0


def test_blocks_of_a_rule_go_with_the_step_and_those_of_a_window_of_its_own_behind_it():
    manager, sequence = streamed(23)
    manager.release_left([sequence])
    assert [table.first for table in sequence.tables] == [3, 3]
    manager.grow([(sequence, 8)])
    manager.release_left([sequence])
    assert [table.first for table in sequence.tables] == [3, 5]


def test_a_rule_comes_before_the_window_that_its_layers_have():
    manager = BlockManager(BlockPool(100), 1, SIZE, [9])
    sequence = manager.create([StreamRule(6, 1)])
    manager.grow([(sequence, 23)])
    manager.release_left([sequence])
    assert sequence.tables[0].first == 0
    sequence.tables[0].release_before(18)
    manager.check_trim(sequence, 21)


@pytest.mark.parametrize("length", range(1, 24))
def test_a_sequence_can_be_cut_to_where_the_whole_window_is_still_there(length):
    manager, sequence = streamed(23)  # positions 4 .. 15 are gone
    if length - 6 + 1 >= 16:
        manager.check_trim(sequence, length)
        manager.trim(sequence, length)
        assert sequence.length == length
    else:
        with pytest.raises(StreamPassedError, match=f"cut to {length} tokens needs the last 6 .* before position 16"):
            manager.check_trim(sequence, length)
    manager.check_trim(sequence, 0)
    manager.check_integrity()


def test_forks_and_cuts_take_the_sinks_along():
    manager = BlockManager(BlockPool(100), 1, SIZE)
    sequence = manager.create([StreamRule(6, 1)])
    manager.grow([(sequence, 10)])
    sequence.sinks = SinkTokens(array("q", [7, 8, 9, 10]), 5)
    child = manager.fork(sequence)
    manager.trim(child, 3)
    assert child.sinks == SinkTokens(array("q", [7, 8, 9]), 5)
    assert child.tables[0].rule == StreamRule(6, 1)
    manager.trim(child, 0)
    assert child.sinks is None
    assert sequence.sinks.extended(array("q", [1])).moved(8) == SinkTokens(array("q", [7, 8, 9, 10, 1]), 5, 8)


@pytest.mark.parametrize(
    ("window", "block_size", "chunk"),
    [(1, 16, 16), (64, 16, 16), (127, 16, 16), (128, 16, 32), (2048, 16, 512), (9, 1, 2)],
)
def test_a_chunk_is_a_quarter_of_the_window_in_whole_blocks(window, block_size, chunk):
    assert chunk_size(window, block_size) == chunk


def test_groups_forget_whose_own_window_is_larger_than_what_is_kept():
    rule, groups = StreamRule(64, 2), [LayerGroup(own, (0,)) for own in (None, 8, 64, 32 + 64 + 16, 32 + 64 + 16 + 1)]
    assert stream_rules(groups, 64, 17, 16) == (rule, None, None, None, rule)
    assert stream_rules(groups[1:4], 64, 17, 16) is None
    assert stream_rules(groups[:1], 64, 0, 16) == (StreamRule(64, 0),)
