from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfpaged.block_pool import BlockPool
from hfpaged.block_table import BlockTable
from hfpaged.step import build_step

BLOCK_SIZE = 4


def tables_of(*lengths, block_size=BLOCK_SIZE):
    """Tables of these lengths over one pool, grown in turns so that their blocks interleave."""
    pool = BlockPool(1000)
    tables = [BlockTable(pool, block_size) for _ in lengths]
    for position in range(max(lengths)):
        for table, length in zip(tables, lengths, strict=True):
            table.grow(int(position < length))
    return tables


def step_of(tables, query_length, kept=None, stores=None):
    kept = None if kept is None else np.array(kept, dtype=bool)
    return build_step(tables, BLOCK_SIZE, query_length, kept, stores or [True] * len(tables))


def test_a_first_step_of_full_rows_stores_each_token_at_its_position():
    tables = tables_of(6, 6)
    step = step_of(tables, 6)
    assert step.slots.tolist() == [table.slot(i) for table in tables for i in range(6)]
    assert step.context_lengths.tolist() == step.query_lengths.tolist() == [6, 6]
    assert step.query_starts.tolist() == [0, 6]
    assert step.num_seqs == 2
    assert (step.is_first, step.is_decode, step.is_contiguous) == (True, False, True)


def test_tensors_are_of_the_types_that_the_kernels_read():
    for step in (step_of(tables_of(6), 6), step_of(tables_of(6), 1), step_of(tables_of(6), 2, [[0, 1]])):
        assert step.slots.dtype == torch.int64
        for name in ("block_tables", "context_lengths", "query_starts", "query_lengths"):
            assert getattr(step, name).dtype == torch.int32


def test_a_decode_step_stores_one_token_behind_each_context():
    tables = tables_of(5, 9, 1)
    step = step_of(tables, 1)
    assert step.slots.tolist() == [table.slot(table.length - 1) for table in tables]
    assert step.context_lengths.tolist() == [5, 9, 1]
    assert step.query_starts.tolist() == [0, 1, 2]
    assert step.query_lengths.tolist() == [1, 1, 1]
    assert (step.is_first, step.is_decode, step.is_contiguous) == (False, True, True)


def test_block_tables_are_stacked_to_the_longest():
    tables = tables_of(5, 9, 1)
    stacked = step_of(tables, 1).block_tables
    assert stacked.shape == (3, 3)
    for row, table in zip(stacked.tolist(), tables, strict=True):
        assert row[: len(table.blocks)] == list(table.blocks)
        assert row[len(table.blocks) :] == [-1] * (3 - len(table.blocks))


def test_left_padding_is_not_stored_and_the_first_token_starts_the_row():
    tables = tables_of(4, 2)
    step = step_of(tables, 4, [[1, 1, 1, 1], [0, 0, 1, 1]])
    first, second = tables
    assert step.slots.tolist() == [first.slot(i) for i in range(4)] + [-1, -1, second.slot(0), second.slot(1)]
    assert step.query_starts.tolist() == [0, 6]
    assert step.query_lengths.tolist() == step.context_lengths.tolist() == [4, 2]
    assert (step.is_first, step.is_decode, step.is_contiguous) == (True, False, True)


def test_right_padding_ends_a_row_early():
    tables = tables_of(2)
    step = step_of(tables, 4, [[1, 1, 0, 0]])
    assert step.slots.tolist() == [tables[0].slot(0), tables[0].slot(1), -1, -1]
    assert step.query_starts.tolist() == [0]
    assert step.query_lengths.tolist() == [2]
    assert step.is_contiguous


def test_padding_inside_of_a_row_is_said_to_break_it():
    tables = tables_of(3, 4)
    step = step_of(tables, 4, [[1, 0, 1, 1], [1, 1, 1, 1]])
    assert step.slots.tolist()[:4] == [tables[0].slot(0), -1, tables[0].slot(1), tables[0].slot(2)]
    assert step.query_lengths.tolist() == [3, 4]
    assert not step.is_contiguous


def test_a_row_of_padding_alone_has_no_query_and_is_whole():
    tables = tables_of(0, 3)
    step = step_of(tables, 3, [[0, 0, 0], [1, 1, 1]])
    assert step.slots.tolist()[:3] == [-1, -1, -1]
    assert step.query_lengths.tolist() == [0, 3]
    assert step.block_tables.tolist() == [[-1], list(tables[1].blocks)]
    assert step.is_contiguous


def test_one_padding_token_makes_a_step_no_decode():
    tables = tables_of(5, 6)
    step = step_of(tables, 1, [[0], [1]])
    assert step.slots.tolist() == [-1, tables[1].slot(5)]
    assert step.query_lengths.tolist() == [0, 1]
    assert step.context_lengths.tolist() == [5, 6]
    assert not step.is_decode


@pytest.mark.parametrize("query_length", [1, 3])
def test_a_row_that_another_one_stores_reads_but_does_not_write(query_length):
    (table,) = tables_of(3)
    step = step_of([table, table.fork()], query_length, stores=[True, False])
    assert step.slots.tolist()[query_length:] == [-1] * query_length
    assert step.slots.tolist()[:query_length] == [table.slot(i) for i in range(3 - query_length, 3)]
    assert step.context_lengths.tolist() == [3, 3]
    assert step.query_lengths.tolist() == [query_length] * 2
    assert step.block_tables[0].tolist() == step.block_tables[1].tolist()


def test_a_later_chunk_is_not_first_even_where_one_row_begins_in_it():
    tables = tables_of(5, 2)
    step = step_of(tables, 2)
    assert not step.is_first
    assert step_of(tables_of(2, 2), 2).is_first


def test_a_step_without_new_tokens_reads_all_that_is_stored():
    tables = tables_of(5, 9)
    step = step_of(tables, 0, stores=[False, False])
    assert step.slots.numel() == 0
    assert step.context_lengths.tolist() == [5, 9]
    assert step.query_lengths.tolist() == [0, 0]
    assert not step.is_decode


def test_a_step_is_moved_to_a_device_once_and_whole():
    step = step_of(tables_of(5, 9), 1)
    assert step.to(torch.device("cpu")) is step
    moved = step.to(torch.device("meta"))
    assert step.to(torch.device("meta")) is moved
    for name in ("slots", "block_tables", "context_lengths", "query_starts", "query_lengths"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(step, name).shape
        assert getattr(step, name).device.type == "cpu"
    assert (moved.num_seqs, moved.is_decode, moved.is_first) == (2, True, False)


def test_blocks_that_were_released_are_not_told_of():
    tables = tables_of(14, 9, 3)
    for table, position in zip(tables, (9, 4, 0), strict=True):
        table.release_before(position)
    step = step_of(tables, 1)
    assert step.context_lengths.tolist() == [14 - 8, 9 - 4, 3]
    assert step.block_tables.tolist() == [[*tables[0].blocks], [*tables[1].blocks], [*tables[2].blocks, -1]]
    assert step.slots.tolist() == [table.slot(table.length - 1) for table in tables]
    assert (step.is_first, step.is_decode) == (False, True)


def test_a_step_behind_blocks_that_have_all_been_released_is_not_the_first():
    (table,) = tables_of(8)
    table.release_before(8)
    table.grow(3)
    step = step_of([table], 3)
    assert step.context_lengths.tolist() == step.query_lengths.tolist() == [3]
    assert not step.is_first


@st.composite
def padded_steps(draw):
    batch, width = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    rows = st.lists(st.booleans(), min_size=width, max_size=width)
    kept = np.array(draw(st.lists(rows, min_size=batch, max_size=batch)))
    past = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    stores = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    gone = [draw(st.integers(0, tokens)) for tokens in past]
    return kept, past, gone, stores, draw(st.sampled_from([1, 2, 4, 8]))


@given(padded_steps())
def test_any_padding_gives_the_slots_that_a_loop_over_tokens_gives(case):
    kept, past, gone, stores, block_size = case
    lengths = [old + int(row.sum()) for old, row in zip(past, kept, strict=True)]
    tables = tables_of(*lengths, block_size=block_size)
    for table, position in zip(tables, gone, strict=True):
        table.release_before(position)
    step = build_step(tables, block_size, kept.shape[1], kept, stores)
    expected, starts, whole = [], [], True
    for row, table in enumerate(tables):
        position = past[row]
        for is_token in kept[row]:
            expected.append(table.slot(position) if is_token and stores[row] else -1)
            position += int(is_token)
        places = np.flatnonzero(kept[row])
        starts.append(row * kept.shape[1] + int(places[0]) if len(places) else None)
        whole &= len(places) == 0 or places[-1] - places[0] + 1 == len(places)
    assert step.slots.tolist() == expected
    assert step.context_lengths.tolist() == [
        length - position // block_size * block_size for length, position in zip(lengths, gone, strict=True)
    ]
    assert step.query_lengths.tolist() == kept.sum(axis=1).tolist()
    assert all(a == b for a, b in zip(step.query_starts.tolist(), starts, strict=True) if b is not None)
    assert step.is_contiguous == whole
    assert step.is_first == (not any(past))
    assert step.is_decode == (kept.shape[1] == 1 and bool(kept.all()))
