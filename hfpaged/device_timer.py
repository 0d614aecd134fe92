"""How long forwards and copies take, told when that is known: a GPU is not made to wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Timed:
    """Something of `size` that began at a time, or at a point in the work of a CUDA device."""

    size: int
    began: float | torch.cuda.Event
    ended: torch.cuda.Event | None = None


class DeviceTimer:
    """Tells `told(size, seconds)` of each that has ended."""

    def __init__(self, told: Callable[[int, float], None]) -> None:
        self._told = told
        self._unfinished: deque[Timed] = deque()

    def begin(self, size: int, device: torch.device | None) -> Timed:
        """Something begins on a device, or where none is known yet."""
        return Timed(size, _mark() if device is not None and device.type == "cuda" else time.perf_counter())

    def end(self, timed: Timed) -> None:
        """It is over, as far as Python is concerned."""
        if isinstance(timed.began, float):
            self._told(timed.size, time.perf_counter() - timed.began)
            return
        timed.ended = _mark()
        self._unfinished.append(timed)
        self.poll()

    def poll(self) -> None:
        """Tell of what the devices have finished meanwhile."""
        while self._unfinished:
            first = self._unfinished[0]
            assert not isinstance(first.began, float)
            assert first.ended is not None
            if not first.ended.query():
                return
            self._unfinished.popleft()
            self._told(first.size, first.began.elapsed_time(first.ended) / 1000)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
