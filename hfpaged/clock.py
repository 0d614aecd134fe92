"""One clock for all that is told of requests."""

from __future__ import annotations

import time

# One origin for all times: the clock of the wall may jump, and differences must not.
_ORIGIN = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since the epoch, never going back."""
    return _ORIGIN + time.perf_counter()
