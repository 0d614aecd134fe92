"""Whether oneDNN's order makes a linear layer faster on this machine: measured, layer shape by layer shape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpaged.onednn_weight import multiply, reordered

ROWS = (1, 2, 4, 8, 16, 32)
PREFILL_ROWS = 256
BATCH_ROWS = (4, 8, 16, 32)
MIN_GAIN = 1.05  # less is noise, and not worth another tensor class in the model
MIN_GAIN_OF_A_STEP, MIN_GAIN_OF_A_PREFILL = 0.85, 0.8  # oneDNN takes 25 microseconds a call: small layers lose at 1 row
STREAMED_BYTES = 32 << 20  # more than a core's caches hold: in a real step weights come from memory, too
ROUNDS = 5


@dataclass(frozen=True)
class RowTime:
    """Seconds of one layer's multiplication with `rows` rows."""

    rows: int
    plain: float
    packed: float

    @property
    def gain(self) -> float:
        return self.plain / self.packed


@dataclass(frozen=True)
class LinearGain:
    """What was measured for the layers of one shape [out, in] and dtype.

    Attributes:
        times: by rows; those of a decode step, which decide, and at the end those of a prefill.
        layers: how many were packed because of it; 0 where it is no gain.
        is_tied: the plain weight stays beside the packed one, and takes inputs of less than `min_rows`.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    times: tuple[RowTime, ...]
    layers: int = 0
    is_tied: bool = False

    @property
    def is_gain(self) -> bool:
        """Faster in decode steps of all these rows together, with none of them much slower, nor a prefill."""
        decode, prefill = self.times[:-1], self.times[-1]
        if prefill.gain < MIN_GAIN_OF_A_PREFILL:
            return False
        if self.is_tied:
            return self.min_rows is not None
        slowest = min(time.gain for time in decode)
        gain = sum(time.plain for time in decode) / sum(time.packed for time in decode)
        return gain > MIN_GAIN and slowest > MIN_GAIN_OF_A_STEP

    @property
    def min_rows(self) -> int | None:
        """From how many rows on the packed weight is always the faster one; None if never."""
        slower = max((time.rows for time in self.times[:-1] if time.gain <= 1), default=0)
        return min((time.rows for time in self.times[:-1] if time.rows > slower), default=None)

    def at(self, rows: int) -> RowTime:
        """Seconds without and with packing, as the layers run. Raises KeyError for rows that were not measured."""
        found = {time.rows: time for time in self.times}[rows]
        is_plain = self.is_tied and rows < (self.min_rows or rows + 1)
        return RowTime(rows, found.plain, found.plain if is_plain else found.packed)


def measure(weights: Sequence[Tensor], rows: Sequence[int] = ROWS, is_tied: bool = False) -> LinearGain:
    """Time plain against reordered weights [out, in], all of one shape and dtype; as many of them as a cache does not
    hold, so this costs that much memory for a moment. Best of a few alternating rounds, as others may use the machine.

    Raises RuntimeError where oneDNN has no kernel for the dtype.
    """
    streamed = weights[: max(1, STREAMED_BYTES // weights[0].nbytes)]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        packed = [reordered(weight) for weight in streamed]
        times = [_row_time(count, streamed, packed) for count in (*sorted(rows), PREFILL_ROWS)]
    out, width = weights[0].shape
    return LinearGain((out, width), weights[0].dtype, tuple(times), is_tied=is_tied)


def _row_time(rows: int, weights: Sequence[Tensor], packed: Sequence[Tensor]) -> RowTime:
    x = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype)
    best = {"plain": [math.inf] * len(weights), "packed": [math.inf] * len(weights)}
    for _ in range(ROUNDS if rows < PREFILL_ROWS else 2):
        for place, weight in enumerate(weights):
            best["plain"][place] = min(best["plain"][place], _seconds(F.linear, x, weight))
        for place, weight in enumerate(packed):
            best["packed"][place] = min(best["packed"][place], _seconds(multiply, x, weight))
    return RowTime(rows, sum(best["plain"]) / len(weights), sum(best["packed"]) / len(weights))


def _seconds(run: Callable[[Tensor, Tensor, None], Tensor], x: Tensor, weight: Tensor) -> float:
    start = time.perf_counter()
    run(x, weight, None)
    return time.perf_counter() - start
