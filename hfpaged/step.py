"""Step metadata: where the tokens of one forward go and what each of them may read. Built once, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.block_table import BlockTable
from hfpaged.filling import Filling
from hfpaged.shared_runs import SharedRun, shared_runs


@dataclass
class Step:
    """One step of one layer group. The tokens lie in one flat list; padded rows and packed tokens are both that.

    slots            [num_tokens] int64, -1 for a token that is not stored
    block_tables     [num_seqs, max_blocks] int32, the blocks that are held; anything behind a table's end
    context_lengths  [num_seqs] int32, the tokens in those blocks with those of this step. Attention with a window
                     does not care at which position it begins, so blocks that left the window are not told of.
    query_starts     [num_seqs] int32, the first token of a sequence in the flat list
    query_lengths    [num_seqs] int32, its tokens in this step
    residuals        [num_seqs] int32, in a format with residuals: which one holds the last block while it is not full
    filling          in such a format: what becomes of the new tokens, instead of `slots`
    """

    slots: Tensor
    block_tables: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    query_lengths: Tensor
    num_seqs: int
    is_decode: bool  # one query token in each sequence
    is_first: bool  # no sequence has a token from before this step
    is_contiguous: bool  # the query tokens of each sequence lie side by side
    shared: tuple[SharedRun, ...] = ()  # for decode: the rows in runs that read the same blocks first
    residuals: Tensor | None = None
    filling: Filling | None = None
    parts: tuple[Step, Step] | None = None
    _on_device: dict[torch.device, Step] = field(default_factory=dict, repr=False, init=False)

    def to(self, device: torch.device) -> Step:
        """The same step with its tensors on `device`; copied once."""
        if self.slots.device == device:
            return self
        if device not in self._on_device:
            parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
            parts |= {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor | Filling)}
            moved = self._on_device[device] = Step(**parts)
            if self.parts:
                first = self.parts[0].num_seqs
                rows = slice(0, first), slice(first, None)
                moved.parts = _rows_of(moved, self.parts[0], rows[0]), _rows_of(moved, self.parts[1], rows[1])
        return self._on_device[device]


def _rows_of(moved: Step, part: Step, rows: slice) -> Step:
    """A part of a step on the device to which the whole has moved: views of what is there already."""
    starts = moved.query_starts[rows]
    return replace(
        part,
        slots=moved.slots,
        block_tables=moved.block_tables[rows],
        context_lengths=moved.context_lengths[rows],
        query_starts=starts - starts[0],
        query_lengths=moved.query_lengths[rows],
        residuals=None if moved.residuals is None else moved.residuals[rows],
    )


@dataclass(frozen=True)
class StepPlan:
    """What is known of a step before its first key: which of its tokens are padding (`kept` False, shape
    [batch, query_length]; None: none is), and for each row the first row with the very same tokens.
    """

    kept: npt.NDArray[np.bool_] | None
    same_as: list[int]


def build_step(
    tables: Many[BlockTable],
    block_size: int,
    query_length: int,
    kept: npt.NDArray[np.bool_] | None,
    stores: Many[bool],
) -> Step:
    """A step of padded rows: `query_length` tokens for each table, which has grown for them already.

    `kept` ([num_seqs, query_length]) is False for padding; None keeps all. `stores[row]` is False for a row whose
    tokens another row stores for it.
    """
    lengths = [query_length] * len(tables) if kept is None else kept.sum(axis=1).tolist()
    contexts = [table.length - table.first * block_size for table in tables]
    if query_length == 1 and kept is None:
        slots = [table.last_slot() if owns else -1 for table, owns in zip(tables, stores, strict=True)]
        flat = np.array(slots, dtype=np.int64)
    else:
        flat = _slots(tables, contexts, block_size, query_length, lengths, kept, stores)
    starts, contiguous = _starts(len(tables), query_length, lengths, kept)
    stacked = stack_tables(tables)
    is_decode = query_length == 1 and all(lengths)
    return Step(
        slots=torch.from_numpy(flat),
        block_tables=torch.from_numpy(stacked),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        query_starts=torch.from_numpy(starts),
        query_lengths=torch.tensor(lengths, dtype=torch.int32),
        num_seqs=len(tables),
        is_decode=is_decode,
        is_first=contexts == lengths and not any(table.first for table in tables),
        is_contiguous=contiguous,
        shared=shared_runs(stacked, contexts, block_size) if is_decode else (),
    )


def _slots(
    tables: Many[BlockTable], contexts: Many[int], block_size: int, query_length: int, lengths: Many[int],
    kept: npt.NDArray[np.bool_] | None, stores: Many[bool],
) -> npt.NDArray[np.int64]:  # fmt: skip
    slots = np.full((len(tables), query_length), -1, dtype=np.int64)
    for row, (table, context, length) in enumerate(zip(tables, contexts, lengths, strict=True)):
        if stores[row] and length:
            positions = np.arange(context - length, context)  # counted from the first block that is held
            blocks = np.frombuffer(table.blocks, dtype=np.int32).astype(np.int64)
            own = blocks[positions // block_size] * block_size + positions % block_size
            slots[row, slice(None) if kept is None else kept[row]] = own
    return slots.reshape(-1)


def _starts(
    num_rows: int, query_length: int, lengths: Many[int], kept: npt.NDArray[np.bool_] | None
) -> tuple[npt.NDArray[np.int32], bool]:
    rows = np.arange(num_rows, dtype=np.int32) * query_length
    if kept is None or query_length == 0:
        return rows, True
    first = kept.argmax(axis=1)
    last = query_length - kept[:, ::-1].argmax(axis=1)
    spans = np.where(np.array(lengths) > 0, last - first, 0)
    return (rows + first).astype(np.int32), bool((spans == lengths).all())


def stack_tables(tables: Many[BlockTable]) -> npt.NDArray[np.int32]:
    """[num_seqs, max_blocks], -1 behind the end of a table."""
    longest = max(len(table.blocks) for table in tables)
    stacked = np.full((len(tables), max(longest, 1)), -1, dtype=np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table.blocks)] = table.blocks
    return stacked
