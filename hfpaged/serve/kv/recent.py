"""The last minutes of one batcher: rates, latencies, and why prompts were not known. All else is read when asked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hfpaged.block_pool import BlockPool
from hfpaged.clock import now
from hfpaged.engine.events import Event, FirstToken, PrefixMatched, StepFinished

WINDOW = 300  # seconds that are remembered
RATE_SECONDS = 5  # of which tokens per second are told: of less they would jump, of more they would lag
MOST_SAMPLES = 8192  # of each latency, so that memory and the time to sort them have an end
MOST_MISSES = 50


@dataclass
class Second:
    """What happened in one second, and how blocks stood at its end. `free` blocks keep no prefix."""

    time: int
    used: int = 0
    cached: int = 0
    reserved: int = 0
    free: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


class Sample(NamedTuple):
    """`times` latencies of so many seconds."""

    time: float
    seconds: float
    times: int = 1


class Recent:
    """A hook. Told of a step it costs a few microseconds; whoever reads it sorts and sums."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._seconds: deque[Second] = deque(maxlen=WINDOW)
        self._first_tokens: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._gaps: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._misses: deque[PrefixMatched] = deque(maxlen=MOST_MISSES)

    def __call__(self, event: Event) -> None:
        note = _NOTES.get(type(event))
        if note is not None:
            with self._lock:
                note(self, event)

    def seconds(self, since: float = 0.0) -> list[Second]:
        """Those in which anything happened, and the one of now; `since` that time, its own second too."""
        time = now()
        with self._lock:
            if not self._seconds or self._seconds[-1].time < int(time):
                self._blocks_of_now(self._second(time))
            return [each for each in self._seconds if each.time >= max(int(since), time - WINDOW)]

    def rates(self) -> tuple[float, float]:
        """Tokens per second in the last ones: (prefill, decode)."""
        time = now()
        first = int(time) - RATE_SECONDS + 1
        with self._lock:
            seconds = [each for each in self._seconds if each.time >= first]
        prefill, decode = sum(s.prefill_tokens for s in seconds), sum(s.decode_tokens for s in seconds)
        return prefill / (time - first), decode / (time - first)

    def prefixes(self) -> tuple[int, int]:
        """Prompt tokens of the last minutes: (looked up, found)."""
        seconds = self.seconds()
        return sum(s.queried_tokens for s in seconds), sum(s.hit_tokens for s in seconds)

    def first_tokens(self) -> list[Sample]:
        """Seconds from arrival to the first token, of the last minutes."""
        return self._samples(self._first_tokens)

    def gaps(self) -> list[Sample]:
        """Seconds between two tokens of a request, of the last minutes."""
        return self._samples(self._gaps)

    def misses(self) -> list[PrefixMatched]:
        """Prompts that were not all known, the latest first."""
        with self._lock:
            return list(reversed(self._misses))

    def _samples(self, samples: deque[Sample]) -> list[Sample]:
        first = now() - WINDOW
        with self._lock:
            return [sample for sample in samples if sample.time >= first]

    def _second(self, time: float) -> Second:
        """That of `time`, which begins with what the one before has left."""
        if not self._seconds or self._seconds[-1].time < int(time):
            last = self._seconds[-1] if self._seconds else Second(0)
            self._seconds.append(Second(int(time), running=last.running, waiting=last.waiting))
        return self._seconds[-1]

    def _blocks_of_now(self, second: Second) -> None:
        stats = self._pool.stats
        second.used, second.cached, second.reserved = stats.used, stats.cached, stats.reserved
        second.free = max(stats.free - stats.cached, 0)

    def _step(self, event: StepFinished) -> None:
        second = self._second(event.time)
        self._blocks_of_now(second)
        second.running, second.waiting = event.num_running, event.num_waiting
        second.prefill_tokens += event.num_prefill_tokens
        second.decode_tokens += event.num_sampled
        self._gaps.extend(Sample(event.time, seconds, count) for seconds, count in event.token_gaps.items())

    def _first_token(self, event: FirstToken) -> None:
        self._first_tokens.append(Sample(event.time, event.time_to_first_token))

    def _matched(self, event: PrefixMatched) -> None:
        second = self._second(event.time)
        second.queried_tokens += event.queried
        second.hit_tokens += event.hit
        if event.reason != "complete":
            self._misses.append(event)


_NOTES: dict[type[Event], Callable[[Recent, Any], None]] = {
    StepFinished: Recent._step,
    FirstToken: Recent._first_token,
    PrefixMatched: Recent._matched,
}


def quantiles(samples: Iterable[Sample], shares: Iterable[float]) -> list[float | None]:
    """Of the latencies, seconds: for each share the least that so many of them do not exceed. None of none."""
    ordered = sorted((sample.seconds, sample.times) for sample in samples)
    total, seen = sum(count for _, count in ordered), 0
    found: list[float | None] = []
    wanted = deque(sorted(shares))
    for seconds, count in ordered:
        seen += count
        while wanted and seen >= wanted[0] * total:
            found.append(seconds)
            wanted.popleft()
    return found + [None] * len(wanted)
