"""Whether oneDNN's order makes a linear layer faster on this machine: measured, layer shape by layer shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hfpaged.onednn_weight import multiply, reordered

ROWS = (1, 2, 4, 8, 16, 32, 256)
DECODE_ROWS = 32  # as many rows a decode step has at most, for the verdict
STREAMED_BYTES = 32 << 20  # more than a core's caches: weights come from memory in a real step, too
MAX_PREFILL_LOSS = 1.25
REPEATS = 3


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
    """What was measured for the layers of one shape [out, in] and dtype, all of them together, by rows."""

    shape: tuple[int, int]
    dtype: torch.dtype
    layers: int
    times: tuple[RowTime, ...]

    @property
    def is_gain(self) -> bool:
        """Faster over all decode steps together, and no prefill much slower."""
        few = [time for time in self.times if time.rows <= DECODE_ROWS] or self.times
        prefill = max(time.packed / time.plain for time in self.times)
        return sum(time.packed for time in few) < sum(time.plain for time in few) and prefill < MAX_PREFILL_LOSS


def measure(weights: Sequence[Tensor], rows: Sequence[int] = ROWS) -> LinearGain:
    """Time plain against reordered weights [out, in], all of one shape and dtype; as many of them as a cache does not
    hold, so this costs that much memory for a moment. Best of a few alternating rounds: others may use the machine.

    Raises RuntimeError where oneDNN has no kernel for the dtype.
    """
    streamed = weights[: max(1, STREAMED_BYTES // weights[0].nbytes)]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        packed = [reordered(weight) for weight in streamed]
        times = [_row_time(count, streamed, packed) for count in rows]
    out, width = weights[0].shape
    return LinearGain((out, width), weights[0].dtype, len(weights), tuple(times))


def _row_time(rows: int, weights: Sequence[Tensor], packed: Sequence[Tensor]) -> RowTime:
    x = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype)
    best = {"plain": float("inf"), "packed": float("inf")}
    runs: dict[str, Callable[[], list[Tensor]]] = {
        "plain": lambda: [F.linear(x, weight) for weight in weights],
        "packed": lambda: [multiply(x, weight, None) for weight in packed],
    }
    for _ in range(REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return RowTime(rows, best["plain"] / len(weights), best["packed"] / len(weights))
