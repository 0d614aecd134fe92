"""The load: keeps a batcher full for so many seconds, lets it come to its end, and counts on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.engine.outputs import RequestOutput
from hfpaged.errors import RequestTooLongError
from hfpaged.stress.caches import OtherCaches
from hfpaged.stress.mix import Attempt, Mix
from hfpaged.stress.native import Checker
from hfpaged.stress.share import TimeShare
from hfpaged.stress.watch import FULL, Watch

FILLING = 0.25  # of the time, at most: long prompts alone, until the pool is full
WAITING = 4  # requests beyond those that run: one is always there when blocks come back
OTHERS, CHECKS = 0.1, 0.05  # of the time: generate() with other caches, integrity checks
DRAIN = 0.2  # of the time, and ten seconds: what has not come to its end by then is aborted
MOST_ERRORS = 10
IDLE = 1.0  # seconds without a computed token, while requests are there: nobody will compute them any more


@dataclass
class Counts:
    """What was sent and what came of it. `computed` and `needed`: tokens of requests of one sequence that finished, as
    often as they were computed, and once.
    """

    received: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    needed: int = 0

    @property
    def recomputed(self) -> float:
        """The part of the computed tokens that had been computed before."""
        return max(self.computed - self.needed, 0) / self.computed if self.computed else 0.0


class Load:
    """One thread: requests are added and aborted between the steps that it makes."""

    def __init__(
        self, batcher: ContinuousBatcher, mix: Mix, others: OtherCaches, checker: Checker, watch: Watch,
        tell: Callable[[Load], None], seconds: float,
    ) -> None:  # fmt: skip
        self._batcher, self._mix, self._others, self.checker, self.watch = batcher, mix, others, checker, watch
        self._tell = tell
        self.counts = Counts()
        self.errors: list[str] = []
        self._in_flight: dict[str, Attempt] = {}
        self._aborts: dict[str, int] = {}  # in which step
        self.stuck = 0  # requests that nothing was done for when they were given up
        self._steps = 0
        self._seconds = seconds
        self._for_others, self._for_checks = TimeShare(OTHERS), TimeShare(CHECKS)

    @property
    def in_flight(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._in_flight)

    def run(self) -> None:
        """Full load until the time is over, then what is there comes to its end."""
        seconds = self._seconds
        self._until(lambda: self.watch.seconds >= seconds, adds=True)
        self.watch.is_loading = False
        end = self.watch.seconds + max(DRAIN * seconds, 10.0)
        self._until(lambda: not self._batcher.has_work or self.watch.seconds >= end, adds=False)
        if not self._batcher.has_work or self.watch.seconds - self.watch.computed_at > IDLE:
            self.stuck = self.in_flight
        for name in list(self._in_flight):
            self._batcher.abort(name)
        while self._batcher.has_work:
            self._step()

    def _until(self, is_over: Callable[[], bool], adds: bool) -> None:
        while not is_over():
            if adds:
                self._fill()
            self._step()
            if adds and self._for_others.is_due(self.watch.seconds):
                with self._for_others:
                    self._others.run()
            if self._for_checks.is_due(self.watch.seconds):
                with self._for_checks:
                    self._batcher.pool.check_integrity()
            self.checker.check_some(self.watch.seconds)
            self.watch.look()
            self._tell(self)

    def _fill(self) -> None:
        most = self._batcher.limits["max_num_seqs"] + WAITING
        fills = self.watch.peak < FULL and self.watch.seconds < FILLING * self._seconds
        while sum(attempt.sequences for attempt in self._in_flight.values()) < most:
            self._add(self._mix.attempt(fills))

    def _add(self, attempt: Attempt) -> None:
        self.counts.received += 1
        self.counts.kinds[attempt.kind] += 1
        try:
            name = self._batcher.add_request(attempt.prompt, **attempt.settings)
        except RequestTooLongError:
            self.counts.rejected += 1
            return
        self._in_flight[name] = attempt
        if attempt.abort_after is not None:
            self._aborts[name] = self._steps + attempt.abort_after

    def _step(self) -> None:
        self._steps += 1
        for name in [name for name, step in self._aborts.items() if step <= self._steps]:
            del self._aborts[name]
            self._batcher.abort(name)
        for output in self._batcher.step():
            if output.finished:
                self._ended(output)

    def _ended(self, output: RequestOutput) -> None:
        attempt = self._in_flight.pop(output.request_id)
        self._aborts.pop(output.request_id, None)
        if output.finish_reason == "abort":
            self.counts.aborted += 1
        elif output.finish_reason == "error":
            self.counts.failed += 1
            if len(self.errors) < MOST_ERRORS:
                self.errors.append(f"{output.request_id} ({attempt.kind}): {output.error!r}")
        else:
            self.counts.finished += 1
            self._finished(attempt, output)

    def _finished(self, attempt: Attempt, output: RequestOutput) -> None:
        if attempt.sequences == 1:
            tokens = len(output.token_ids)
            self.counts.computed += output.metrics.computed_tokens
            self.counts.needed += len(attempt.prompt) - output.num_cached_tokens + tokens - 1
        if attempt.is_greedy:
            asked = attempt.settings["max_new_tokens"]
            self.checker.offer(output.request_id, attempt.prompt, output.token_ids, asked)
