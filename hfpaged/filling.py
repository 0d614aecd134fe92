"""Where the tokens of a step go in a format with residuals: into residuals, until these are full, or into blocks that
the step fills whole.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.block_table import BlockTable
from hfpaged.residuals import NONE, Residuals

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Filling:
    """One step of one layer group, to be done in this order.

    reopened       [n, 2] int64: (block, residual): the block was full once, and is read back into a residual
    slots          [num_tokens] int64: residual * block_size + offset, -1 for a token that goes into no residual
    filled         [n] int64: blocks whose residual is full now, and filled_rows [n, block_size], its slots
    whole          [n] int64: blocks that the step fills from their first token, whole_rows [n, block_size] its tokens
    """

    reopened: Tensor
    slots: Tensor
    filled: Tensor
    filled_rows: Tensor
    whole: Tensor
    whole_rows: Tensor

    def to(self, device: torch.device) -> Filling:
        return Filling(*(getattr(self, field.name).to(device) for field in fields(self)))


class FillingPlan:
    """Takes row after row of a step and gives unfilled blocks their residuals."""

    def __init__(self, residuals: Residuals, block_size: int, num_tokens: int, one_layer: bool = False) -> None:
        self._residuals, self._block_size, self._one_layer = residuals, block_size, one_layer
        self.opened: list[int] = []  # blocks that the step reopened
        self.full: list[int] = []  # blocks whose residual is full now
        self._reopened: list[tuple[int, int]] = []
        self._slots = np.full(num_tokens, NONE, dtype=np.int64)
        self._filled_rows: list[Ints] = []
        self._whole: list[int] = []
        self._whole_rows: list[Ints] = []

    def add(self, table: BlockTable, context: int, tokens: Ints) -> None:
        """`tokens`, numbers within the step, are the last of the `context` tokens that the table's blocks hold."""
        size, begin = self._block_size, context - len(tokens)
        for number in range(begin // size, -(-context // size)):
            start = number * size
            first, end = max(begin - start, 0), min(context - start, size)
            self._add(table.blocks[number], first, end, tokens[start + first - begin : start + end - begin])

    def _add(self, block: int, first: int, end: int, tokens: Ints) -> None:
        """`tokens` take the places first .. end of `block`."""
        size = self._block_size
        if end - first == size:
            self._whole.append(block)
            self._whole_rows.append(tokens)
            return
        residual = self._residuals.of(block)
        if residual == NONE:
            residual = self._residuals.open(block)
            if first or self._one_layer:  # the tokens before, or those of the other layers, lie in the block
                self.opened.append(block)
                self._reopened.append((block, residual))
        self._slots[tokens] = np.arange(residual * size + first, residual * size + end)
        if end == size:
            self.full.append(block)
            self._filled_rows.append(np.arange(residual * size, (residual + 1) * size))

    def filling(self) -> Filling:
        """All rows together."""
        size = self._block_size
        return Filling(
            torch.tensor(self._reopened, dtype=torch.int64).reshape(-1, 2),
            torch.from_numpy(self._slots),
            torch.tensor(self.full, dtype=torch.int64),
            _stacked(self._filled_rows, size),
            torch.tensor(self._whole, dtype=torch.int64),
            _stacked(self._whole_rows, size),
        )


def residuals_of(tables: Many[BlockTable], contexts: Many[int], block_size: int, residuals: Residuals) -> Tensor:
    """[num_seqs] int32: where the last block of each table lies while it is not full, NONE for in the block."""
    found = [
        residuals.of(table.blocks[-1]) if context % block_size else NONE
        for table, context in zip(tables, contexts, strict=True)
    ]
    return torch.tensor(found, dtype=torch.int32)


def _stacked(rows: list[Ints], size: int) -> Tensor:
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, size, dtype=torch.int64)
