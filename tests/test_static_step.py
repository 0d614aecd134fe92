"""The buffers of a step that stays where it is: its padding, and what is left of steps before."""

from __future__ import annotations

import pytest
import torch

from hfpaged.block_pool import BlockPool
from hfpaged.block_table import BlockTable
from hfpaged.packed_step import build_packed_step
from hfpaged.static_step import ALIGNMENT, StaticInputs

CPU = torch.device("cpu")


def step(*lengths):
    """A decode step of sequences with so many tokens, in blocks of 4."""
    pool, tables = BlockPool(100), []
    for length in lengths:
        table = BlockTable(pool, 4)
        table.grow(length)
        tables.append(table)
    return build_packed_step(tables, [1] * len(lengths), 4)


def test_a_step_without_sequences_is_all_padding():
    inputs = StaticInputs(3, (2, 5), CPU)
    assert inputs.ids.tolist() == inputs.positions.tolist() == [[0, 0, 0]]
    assert [each.block_tables.shape for each in inputs.steps] == [(3, 2), (3, 5)]
    for each in inputs.steps:
        assert each.slots.tolist() == [-1, -1, -1]
        assert each.context_lengths.tolist() == [0, 0, 0]
        assert each.query_starts.tolist() == [0, 1, 2]
        assert each.query_lengths.tolist() == [1, 1, 1]
        assert (each.num_seqs, each.is_decode, each.is_first, each.shared) == (3, True, False, ())


def test_fewer_sequences_than_before_leave_nothing_of_those_behind():
    inputs = StaticInputs(4, (4,), CPU)
    inputs.fill([7, 8, 9], [4, 8, 0], [step(5, 9, 1)])
    inputs.fill([5], [5], [step(6)])
    (static,) = inputs.steps
    assert inputs.ids.tolist() == [[5, 0, 0, 0]]
    assert inputs.positions.tolist() == [[5, 0, 0, 0]]
    assert static.slots.tolist() == [step(6).slots[0], -1, -1, -1]
    assert static.context_lengths.tolist() == [6, 0, 0, 0]


def test_all_parts_of_a_step_arrive_where_a_forward_reads_them():
    inputs = StaticInputs(4, (3, 8), CPU)
    addresses = [each.block_tables.data_ptr() for each in inputs.steps]
    given = [step(5, 9, 1), step(17, 30, 2)]
    inputs.fill([7, 8, 9], [16, 29, 1], given)
    for static, each in zip(inputs.steps, given, strict=True):
        assert torch.equal(static.slots[:3], each.slots)
        assert torch.equal(static.context_lengths[:3], each.context_lengths)
        width = each.block_tables.shape[1]
        assert torch.equal(static.block_tables[:3, :width], each.block_tables)
        assert static.block_tables.is_contiguous()
    assert [each.block_tables.data_ptr() for each in inputs.steps] == addresses


def test_every_part_begins_where_kernels_read_fast():
    for each in StaticInputs(3, (5, 1, 7), CPU).steps:
        for part in (each.slots, each.context_lengths, each.block_tables):
            assert part.storage_offset() * part.itemsize % ALIGNMENT == 0


def test_tables_that_are_too_wide_are_no_silent_loss():
    with pytest.raises(ValueError, match="broadcast"):
        StaticInputs(2, (2,), CPU).fill([1], [8], [step(9)])


def test_buffers_made_in_inference_mode_are_filled_outside_of_it():
    with torch.inference_mode():
        inputs = StaticInputs(2, (2,), CPU)
        inputs.fill([3], [1], [step(2)])
    inputs.fill([4, 5], [1, 3], [step(2, 4)])
    assert inputs.ids.tolist() == [[4, 5]]
