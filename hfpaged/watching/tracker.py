"""What readings of one thing come to: rates of the last seconds, and totals since the watch began."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hfpaged.watching.source import PoolSource, Reading

# Rates are those of so many seconds: of less they would jump, of more they would lag.
WINDOW = 3.0


@dataclass(frozen=True)
class Figures:
    """What is told of one thing. Rates in tokens per second; `hit_rate` is None before anything was looked up."""

    name: str
    now: Reading
    prefill_rate: float
    decode_rate: float
    hit_rate: float | None
    prefill_tokens: int
    decode_tokens: int
    peak_blocks: int
    seconds: float
    busy_seconds: float
    is_over: bool


class Tracker:
    """Looks at one source. `seconds` in which nothing is computed do not count as busy."""

    def __init__(self, source: PoolSource, name: str, time: float) -> None:
        self.source, self.name = source, name
        self._first = source.read(time)
        self._recent = deque([self._first])
        self._peak = self._first.blocks_used
        self._busy = 0.0
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    def look(self, time: float) -> None:
        """Read once more."""
        self._is_over = self.source.is_over  # before the look, which then is the last one that is needed
        before, now = self._recent[-1], self.source.read(time)
        self._peak = max(self._peak, now.blocks_used, now.peak_blocks)
        if now.prefill_tokens > before.prefill_tokens or now.decode_tokens > before.decode_tokens:
            self._busy += time - before.time
        self._recent.append(now)
        while len(self._recent) > 2 and time - self._recent[1].time >= WINDOW:
            self._recent.popleft()

    @property
    def figures(self) -> Figures:
        """As of the last look."""
        first, past, now = self._first, self._recent[0], self._recent[-1]
        queries, hits = now.prefix_queries - first.prefix_queries, now.prefix_hits - first.prefix_hits
        passed = now.time - past.time
        return Figures(
            name=self.name,
            now=now,
            prefill_rate=(now.prefill_tokens - past.prefill_tokens) / passed if passed > 0 else 0.0,
            decode_rate=(now.decode_tokens - past.decode_tokens) / passed if passed > 0 else 0.0,
            hit_rate=hits / queries if queries else None,
            prefill_tokens=now.prefill_tokens - first.prefill_tokens,
            decode_tokens=now.decode_tokens - first.decode_tokens,
            peak_blocks=self._peak,
            seconds=now.time - first.time,
            busy_seconds=self._busy if now.busy_seconds is None else now.busy_seconds,
            is_over=self._is_over,
        )
