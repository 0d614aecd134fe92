"""One clock for all that is told of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

# One origin for all times: the clock of the wall may jump, and differences must not.
_ORIGIN = time.time() - time.perf_counter()


@dataclass
class VirtualTime:
    """A time that stands still until its owner moves it: `seconds` since whatever its owner says."""

    seconds: float = 0.0


_virtual: ContextVar[VirtualTime | None] = ContextVar("hfpaged_virtual_time", default=None)


def now() -> float:
    """Seconds since the epoch, never going back."""
    there = _virtual.get()
    return _ORIGIN + time.perf_counter() if there is None else there.seconds


@contextmanager
def virtual_time() -> Iterator[VirtualTime]:
    """In this context, and in no other thread, `now` is what this yields: for who replays hours in seconds."""
    there = VirtualTime()
    token = _virtual.set(there)
    try:
        yield there
    finally:
        _virtual.reset(token)
