"""Whether bringing blocks back pays: what copies and prompts have taken, measured, against each other."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

Source = Literal["host", "below"]

# Measurements that are looked at: the median of so many, as a machine has other things to do at times.
SEEN = 9
# What fewer tokens take says little of what one more takes.
FEWEST_TOKENS = 32
# Of lookups whose restore would not pay one in so many is restored all the same, to measure again.
RETRY = 32


class RestoreCosts:
    """Seconds of copies from host memory, or from what is below it, by byte, and of prompts by token. While one of the
    two is not known, everything pays, and so becomes known.
    """

    def __init__(self) -> None:
        self._copies: dict[Source, deque[float]] = {"host": deque(maxlen=SEEN), "below": deque(maxlen=SEEN)}
        self._prompts: deque[float] = deque(maxlen=SEEN)
        self._declined = 0

    def told_copy(self, source: Source, nbytes: int, seconds: float) -> None:
        """So many bytes came back in so many seconds."""
        if nbytes > 0:
            self._copies[source].append(seconds / nbytes)

    def told_prompt(self, tokens: int, seconds: float) -> None:
        """A forward of so many prompt tokens took so long."""
        if tokens >= FEWEST_TOKENS:
            self._prompts.append(seconds / tokens)

    def bytes_per_second(self, source: Source) -> float | None:
        """None where nothing was measured."""
        seconds = _median(self._copies[source])
        return 1 / seconds if seconds else None

    @property
    def seconds_per_token(self) -> float | None:
        """Of computing a prompt; None where nothing was measured."""
        return _median(self._prompts)

    def pays(self, tokens: int, nbytes: dict[Source, int]) -> bool:
        """Whether so many bytes from each source come sooner than as many tokens are computed."""
        computing = self.seconds_per_token
        copying = [(_median(self._copies[source]), count) for source, count in nbytes.items() if count]
        if computing is None:
            return True
        return sum((seconds or 0.0) * count for seconds, count in copying) <= tokens * computing

    def is_due(self) -> bool:
        """Of a restore that does not pay: whether it is time to measure one again. Counts it."""
        self._declined += 1
        return self._declined % RETRY == 0


def _median(values: deque[float]) -> float | None:
    return median(values) if values else None
