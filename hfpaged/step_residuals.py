"""What the step under way does to residuals: which it opened and filled, until the step is over or undone."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np

from hfpaged.block_table import BlockCopy, BlockTable
from hfpaged.content import Bools
from hfpaged.filling import FillingPlan, Ints, residuals_of
from hfpaged.residuals import NONE, Residuals
from hfpaged.step import Step


class StepResiduals:
    """Of the rows of one cache; all calls under the lock of the pool."""

    def __init__(self, residuals: Residuals | None) -> None:
        self._residuals = residuals
        self._full: list[int] = []  # their residuals hold the truth until every layer has quantized them
        self._opened: list[int] = []  # read back from their blocks

    def copies(self, by_group: list[list[BlockCopy]]) -> list[list[BlockCopy]]:
        """Copies-on-write of blocks that are not full copy what lies in their residuals."""
        residuals = self._residuals
        if residuals is None:
            return by_group
        return [
            [
                copy if residuals.of(copy.source) == NONE
                else replace(copy, residuals=(residuals.of(copy.source), residuals.open(copy.target)))
                for copy in group
            ]
            for group in by_group
        ]  # fmt: skip

    def with_filling(
        self, step: Step, tables: Many[BlockTable], kept: Bools | None, stores: Many[bool], one_layer: bool = False
    ) -> Step:
        """The step with what it does to residuals, which are opened here. Where it is of `one_layer` only, the others
        must read back what it reopens.
        """
        if self._residuals is None:
            return step
        width = len(step.slots) // len(tables)
        every = np.ones((len(tables), width), dtype=bool) if kept is None else kept
        tokens = [row * width + np.flatnonzero(own & stores[row]) for row, own in enumerate(every)]
        return self._filled(step, tables, tokens, one_layer)

    def with_packed_filling(self, step: Step, tables: Many[BlockTable]) -> Step:
        """As `with_filling`, for tokens of the sequences that lie side by side."""
        if self._residuals is None:
            return step
        starts, lengths = step.query_starts.tolist(), step.query_lengths.tolist()
        tokens = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return self._filled(step, tables, tokens)

    def _filled(self, step: Step, tables: Many[BlockTable], tokens: Many[Ints], one_layer: bool = False) -> Step:
        """`tokens`: which of the step's each table stores."""
        assert self._residuals is not None
        plan = FillingPlan(self._residuals, tables[0].block_size, len(step.slots), one_layer)
        contexts = step.context_lengths.tolist()
        for table, context, own in zip(tables, contexts, tokens, strict=True):
            if len(own):
                plan.add(table, context, own)
        self._full += plan.full
        self._opened += plan.opened
        where = residuals_of(tables, contexts, tables[0].block_size, self._residuals)
        return replace(step, residuals=where, filling=plan.filling())

    def reading(self, step: Step, tables: Many[BlockTable]) -> Step:
        """The step, which only reads, with the residuals that it reads."""
        if self._residuals is None:
            return step
        contexts = step.context_lengths.tolist()
        return replace(step, residuals=residuals_of(tables, contexts, tables[0].block_size, self._residuals))

    @property
    def are_due(self) -> bool:
        """Whether a step filled or reopened some."""
        return bool(self._full or self._opened)

    def settle(self) -> None:
        """The step is over: what it filled lies in its blocks."""
        if self._residuals is not None:
            for block in self._full:
                self._residuals.close(block)
            self._full, self._opened = [], []

    def undo(self) -> None:
        """The step will be undone: what it filled stays in residuals, what it read back is in no layer for sure. Of the
        latter the blocks hold the truth, quantized once more in layers that have filled them meanwhile.
        """
        if self._residuals is not None:
            for block in self._opened:
                self._residuals.close(block)
            self._full, self._opened = [], []
