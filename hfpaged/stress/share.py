"""A share of the time for something beside the load, so that it stays the load that is measured."""

from __future__ import annotations

import time


class TimeShare:
    """`with share:` around the work; `is_due` while one more, as long as the last one, takes no more than its part."""

    def __init__(self, part: float) -> None:
        self._part = part
        self.seconds = self._last = 0.0

    def is_due(self, elapsed: float) -> bool:
        """Whether there is time for one more, so many seconds after the beginning."""
        return self.seconds + self._last <= self._part * elapsed

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._last = time.perf_counter() - self._began
        self.seconds += self._last
