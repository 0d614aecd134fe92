"""Waiting for what others do, for those too who load no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 30.0  # seconds; a machine may be busy, and whoever waits in vain waits once


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE, pause: float = 0.005) -> None:
    """Until `holds` says something true. A question that costs those who are waited for something wants a pause."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"nothing came of it in {seconds} s"
        time.sleep(pause)
