"""Times functions by wrapping them, and knows what the wrapping itself costs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CALIBRATION_CALLS = 2000


class Stopwatch:
    """Seconds spent in all functions that it wraps, and the number of their calls. They must not call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, on the clock."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        return wrapper


@dataclass(frozen=True)
class WrapperCost:
    """Seconds that one timed call adds: `inside` of what the stopwatch counts, and in all."""

    inside: float
    total: float

    @classmethod
    def measured(cls) -> WrapperCost:
        """The median of a few rounds with a function that does nothing."""
        rounds = [_round() for _ in range(5)]
        return cls(*(statistics.median(values) for values in zip(*rounds, strict=True)))


def _round() -> tuple[float, float]:
    watch = Stopwatch()
    bare = _seconds_per_call(_nothing)
    wrapped = _seconds_per_call(watch.timed(_nothing))
    return max(watch.seconds / watch.calls - bare, 0.0), max(wrapped - bare, 0.0)


def _seconds_per_call(function: Callable[..., Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALIBRATION_CALLS):
        function(1, 2, three=3)
    return (time.perf_counter() - start) / CALIBRATION_CALLS


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
