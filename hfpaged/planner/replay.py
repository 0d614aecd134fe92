"""Replay a trace: the real scheduler and the real pool, with a cost model in place of the forward, on virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from hfpaged.clock import VirtualTime, virtual_time
from hfpaged.planner.cost_model import CostModel
from hfpaged.planner.outcome import Outcome, outcome_of
from hfpaged.planner.replay_engine import ReplayEngine
from hfpaged.planner.replay_fleet import Make, ReplayFleet
from hfpaged.planner.replay_request import ReplayRequest
from hfpaged.planner.trace import Trace
from hfpaged.planner.variant import Variant

TELL_EVERY = 0.2  # seconds between two calls of `told`


class Replay:
    """One run of a trace. `told` is called now and then with the requests that are over; `make` gives the engine of one
    replica.
    """

    def __init__(
        self, trace: Trace, variant: Variant, cost: CostModel, told: Callable[[int], None] | None = None, *,
        make: Make = ReplayEngine,
    ) -> None:  # fmt: skip
        self.trace, self.variant = trace, variant
        self._cost, self._told, self._make = cost.for_token_bytes(variant.token_bytes), told, make
        self.engine: ReplayEngine | ReplayFleet | None = None

    def run(self) -> Outcome:
        """To its end, or to Ctrl-C; that is said in the outcome."""
        began, was_interrupted = time.perf_counter(), False
        with virtual_time() as now:
            self.engine = self._engine(now)
            try:
                self._run(self.engine, now)
            except KeyboardInterrupt:
                was_interrupted = True
            wall = time.perf_counter() - began
            return outcome_of(self.variant, self.engine.parts, now.seconds, wall, was_interrupted=was_interrupted)

    def _engine(self, now: VirtualTime) -> ReplayEngine | ReplayFleet:
        if self.variant.replicas == 1:
            return self._make(self.variant, self._cost, now)
        return ReplayFleet(self.variant, self._cost, now, self._make)

    def _run(self, engine: ReplayEngine | ReplayFleet, now: VirtualTime) -> None:
        told_at = time.perf_counter()
        arrivals = self._arrivals()
        coming = next(arrivals, None)
        while coming is not None or engine.has_work:
            if coming is not None and not engine.has_work:
                now.seconds = max(now.seconds, coming.arrival_time)
            while coming is not None and coming.arrival_time <= now.seconds:
                engine.add(coming)
                coming = next(arrivals, None)
            if engine.has_work:
                engine.step(None if coming is None else coming.arrival_time)
            if self._told is not None and time.perf_counter() - told_at > TELL_EVERY:
                told_at = time.perf_counter()
                self._told(engine.num_over)

    def _arrivals(self) -> Iterator[ReplayRequest]:
        """Made one by one: all together would fill the memory."""
        for number, asked in enumerate(self.trace.requests):
            yield ReplayRequest(self.trace, asked, number, asked.arrival / self.variant.rate)


def replay(
    trace: Trace, variant: Variant, cost: CostModel, told: Callable[[int], None] | None = None
) -> Outcome:  # fmt: skip
    """How `variant` does on `trace`, where steps take what `cost` says."""
    return Replay(trace, variant, cost, told).run()
