"""Counts the positions that pass the model while it computes a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.bench.generation import Rows
from hfpaged.bench.result import Measured
from hfpaged.bench.watch import Watch


class PrefillPositions(Watch):
    """`count` positions passed the model's embedding before generate()'s first step was over: all that is computed,
    padding and what is known already included.
    """

    def __init__(self) -> None:
        super().__init__(self._stop)
        self.count = 0
        self._is_over = False

    def add(self, module: Any, args: Any, output: Tensor) -> None:
        if not self._is_over:
            self.count += output.shape[:-1].numel()

    def _stop(self) -> None:
        self._is_over = True


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[PrefillPositions]:
    """A counter for one generate(), to be given to it as a watch."""
    positions = PrefillPositions()
    hook = model.get_input_embeddings().register_forward_hook(positions.add)
    try:
        yield positions
    finally:
        hook.remove()


class Counted(Protocol):
    """What one side did: the positions that its prefills computed, and its tokens."""

    @property
    def positions(self) -> int: ...

    @property
    def rows(self) -> Rows: ...


def still_computed(plain: Counted, paged: Counted, note: str) -> Measured:
    """The part of the positions of `plain` that `paged` computed."""
    return Measured(
        value=paged.positions / plain.positions,
        plain=plain.positions,
        paged=paged.positions,
        unit="pos",
        same_tokens=plain.rows == paged.rows,
        note=note,
    )
