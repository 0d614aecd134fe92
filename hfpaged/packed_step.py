"""Metadata of a packed step: the tokens of many sequences side by side, each sequence with as many as it has.

As in Orca (Yu et al. 2022, OSDI): prefill and decode share one forward. Sequences with one token come first, so that
the decode kernel reads them as they lie.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from hfpaged.block_table import BlockTable
from hfpaged.shared_runs import shared_runs
from hfpaged.step import Step, stack_tables


def build_packed_step(tables: Many[BlockTable], counts: Many[int], block_size: int) -> Step:
    """A step of `counts[i]` tokens for `tables[i]`, which has grown for them. Those with one token come first."""
    decodes = next((number for number, count in enumerate(counts) if count != 1), len(counts))
    contexts = [table.length - table.first * block_size for table in tables]
    slots = [np.array([table.last_slot() for table in tables[:decodes]], dtype=np.int64)]
    slots += [
        _slots(table, context, count, block_size)
        for table, context, count in zip(tables[decodes:], contexts[decodes:], counts[decodes:], strict=True)
    ]
    stacked, lengths = stack_tables(tables), np.array(counts, dtype=np.int32)
    return Step(
        slots=torch.from_numpy(np.concatenate(slots)),
        block_tables=torch.from_numpy(stacked),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        query_starts=torch.from_numpy((np.cumsum(lengths) - lengths).astype(np.int32)),
        query_lengths=torch.from_numpy(lengths),
        num_seqs=len(tables),
        is_decode=decodes == len(tables),
        is_first=False,  # chunks read what is stored, the first one too: how a prompt was cut must not show
        is_contiguous=True,
        shared=shared_runs(stacked[:decodes], contexts[:decodes], block_size) if decodes > 1 else (),
    )


def with_parts(step: Step) -> Step:
    """A finished step with its decodes and its prefills apart, where it has both."""
    decodes = int((step.query_lengths == 1).long().cumprod(0).sum())
    if not 0 < decodes < step.num_seqs:
        return step if step.is_decode else replace(step, shared=())
    first = _part(step, slice(0, decodes), is_decode=True)
    return replace(step, parts=(first, _part(step, slice(decodes, None), is_decode=False)), shared=())


def _part(step: Step, rows: slice, is_decode: bool) -> Step:
    """Some sequences of a step, as attention reads them: what is written is the whole step's."""
    starts = step.query_starts[rows]
    return replace(
        step,
        block_tables=step.block_tables[rows],
        context_lengths=step.context_lengths[rows],
        query_starts=starts - starts[0],
        query_lengths=step.query_lengths[rows],
        num_seqs=len(starts),
        is_decode=is_decode,
        shared=step.shared if is_decode else (),
        residuals=None if step.residuals is None else step.residuals[rows],
        filling=None,
    )


def _slots(table: BlockTable, context: int, count: int, block_size: int) -> npt.NDArray[np.int64]:
    positions = np.arange(context - count, context)  # counted from the first block that is held
    blocks = np.frombuffer(table.blocks, dtype=np.int32).astype(np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size
