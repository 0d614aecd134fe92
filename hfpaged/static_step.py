"""The inputs of a decode step in buffers that stay where they are: what a captured forward reads again and again.

A step of fewer sequences than there is room for is padded. A sequence that is padding is stored nowhere (slot -1) and
sees nothing (context length 0), so that attention gives it zeros; what the model makes of it is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.step import Step

# Where a part of the buffer may begin, in bytes: Triton reads more at a time where pointers are so aligned.
ALIGNMENT = 16


class _Part(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class _Group(NamedTuple):
    """What of a layer group is put into the buffer; as arrays of the host."""

    slots: npt.NDArray[np.int64]
    context_lengths: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]


class StaticInputs:
    """For steps of at most `size` sequences, whose tables in layer group i have at most `widths[i]` blocks.

    `ids` and `positions` are int64 [1, size]; `steps` has one step for each layer group. All lie in one buffer on
    `device`, which is filled by one copy from another one on the host.
    """

    def __init__(self, size: int, widths: tuple[int, ...], device: torch.device) -> None:
        self.size, self.widths = size, widths
        parts = [_Part((size,), torch.int64)] * 2
        for width in widths:
            parts += [
                _Part((size,), torch.int64), _Part((size,), torch.int32), _Part((size, width), torch.int32)
            ]  # fmt: skip
        nbytes = sum(_aligned(part.nbytes) for part in parts)
        with torch.inference_mode(False):  # buffers made in one mode are filled in the other
            self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._ids, self._positions, *arrays = (view.numpy() for view in _views(self._host, parts))
        self._groups = [_Group(*each) for each in _triples(arrays)]
        ids, positions, *tensors = _views(self._device, parts)
        self.ids, self.positions = ids[None], positions[None]
        self.steps = [_step(size, *each) for each in _triples(tensors)]
        self._pad(0)
        self._device.copy_(self._host)

    def fill(self, ids: Many[int], positions: Many[int], steps: Many[Step]) -> None:
        """Put a step in place: one token and its position for each sequence, and the steps of all layer groups."""
        count = len(ids)
        self._ids[:count], self._positions[:count] = ids, positions
        for group, step in zip(self._groups, steps, strict=True):
            group.slots[:count] = step.slots.numpy()
            group.context_lengths[:count] = step.context_lengths.numpy()
            group.block_tables[:count, : step.block_tables.shape[1]] = step.block_tables.numpy()
        self._pad(count)
        self._device.copy_(self._host)  # waits: the host buffer may be filled again at once

    def _pad(self, count: int) -> None:
        """All sequences from number `count` on are padding."""
        self._ids[count:], self._positions[count:] = 0, 0
        for group in self._groups:  # of tables no more is read than the lengths say
            group.slots[count:], group.context_lengths[count:] = -1, 0


def _triples(parts: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(parts[start : start + 3]) for start in range(0, len(parts), 3)]


def _step(size: int, slots: Tensor, context_lengths: Tensor, block_tables: Tensor) -> Step:
    return Step(
        slots=slots,
        block_tables=block_tables,
        context_lengths=context_lengths,
        query_starts=torch.arange(size, dtype=torch.int32, device=slots.device),
        query_lengths=torch.ones(size, dtype=torch.int32, device=slots.device),
        num_seqs=size,
        is_decode=True,
        is_first=False,
        is_contiguous=True,
    )


def _views(buffer: Tensor, parts: Many[_Part]) -> list[Tensor]:
    """The parts of a buffer of bytes, one behind the other."""
    views, start = [], 0
    for part in parts:
        views.append(buffer[start : start + part.nbytes].view(part.dtype).view(part.shape))
        start += _aligned(part.nbytes)
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
