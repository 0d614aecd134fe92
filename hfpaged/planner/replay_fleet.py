"""Several engines of a replay, each with a pool and a time of its own, behind what chooses among the replicas of
`hfpaged serve --replicas`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from hfpaged.clock import VirtualTime
from hfpaged.planner.cost_model import CostModel
from hfpaged.planner.replay_engine import ReplayEngine
from hfpaged.planner.replay_request import ReplayRequest
from hfpaged.planner.replay_stats import ReplayStats
from hfpaged.planner.variant import Variant
from hfpaged.replicas.published import PublishedPrefixes
from hfpaged.replicas.routing import Routing
from hfpaged.replicas.routing_hash import RoutingHash
from hfpaged.replicas.routing_stats import STATS_SECONDS, stats_to_tell

SECRET = b"of nobody: these hashes leave no process"

Make = Callable[[Variant, CostModel, VirtualTime], ReplayEngine]


class ReplayFleet:
    """`variant.replicas` engines that `make` gives, and one ingress. What comes goes where Routing says, or to each in
    turn; the engine that has come least far makes the next step. Engines tell of themselves as often as replicas do.
    What comes while an engine makes a step finds what the step leaves, as in a replay of one engine.
    """

    def __init__(self, variant: Variant, cost: CostModel, time: VirtualTime, make: Make) -> None:
        self._time, self._hash = time, RoutingHash(SECRET)
        self._replicas = [_Replica(variant, make(variant, cost, time), self._hash) for _ in range(variant.replicas)]
        self._told: dict[str, Any] = {}
        self._ticks = -1
        self._chance = random.Random(0)
        routing = Routing(clock=lambda: time.seconds, rng=self._chance)
        self._routing = routing if variant.router == "prefix" else None
        self._turn = itertools.cycle(self._replicas)

    @property
    def engines(self) -> list[ReplayEngine]:
        return [each.engine for each in self._replicas]

    @property
    def has_work(self) -> bool:
        return any(each.engine.has_work for each in self._replicas)

    @property
    def num_over(self) -> int:
        """Requests that have ended or were refused."""
        return sum(each.engine.num_over for each in self._replicas)

    @property
    def parts(self) -> list[ReplayStats]:
        return [each.engine.stats for each in self._replicas]

    def add(self, request: ReplayRequest) -> None:
        """A request comes, and goes to a replica."""
        self._time.seconds = request.arrival_time
        self._tell(request.arrival_time)
        replica = self._choose(request)
        if not replica.engine.has_work:
            replica.at = max(replica.at, request.arrival_time)
        self._time.seconds = replica.at
        replica.engine.add(request)
        self._settle_time()

    def step(self, until: float | None) -> None:
        """One step of one engine, or as many as have nobody awake in them. `until` is when the next request comes."""
        if until is not None:
            self._tell(until)
        replica = min((each for each in self._replicas if each.engine.has_work), key=_at)
        self._time.seconds = replica.at
        replica.engine.step(until)
        replica.at = self._time.seconds
        self._settle_time()

    def _settle_time(self) -> None:
        """Up to the beginning of the next step; at the end, until the last one is over."""
        busy = [each.at for each in self._replicas if each.engine.has_work]
        self._time.seconds = min(busy) if busy else max(map(_at, self._replicas))

    def _tell(self, until: float) -> None:
        """What is told last before `until`, if it is time for that: nobody asks for what is told before it."""
        ticks = int(until // STATS_SECONDS)
        if self._routing is not None and ticks > self._ticks and self._time.seconds >= ticks * STATS_SECONDS:
            self._ticks = ticks
            self._told = {str(number): each.stats() for number, each in enumerate(self._replicas)}

    def _choose(self, request: ReplayRequest) -> _Replica:
        if self._routing is None:
            return next(self._turn)
        if not (hashes := self._hashes_of(request)):
            return self._any(request)
        loads = {str(number): each.engine.num_requests for number, each in enumerate(self._replicas)}
        return self._replicas[int(self._routing.choose(hashes, self._told, loads)[0])]

    def _any(self, request: ReplayRequest) -> _Replica:
        """Where nothing can be known: as Ray Serve does it, the less loaded of two taken by chance."""
        return min(self._chance.sample(self._replicas, 2), key=lambda each: each.engine.num_requests)

    def _hashes_of(self, request: ReplayRequest) -> bytes:
        """As an ingress makes them."""
        variant = self._replicas[0].engine.variant
        if not variant.prefix_sharing:
            return b""
        return self._hash.chain([], request.all_tokens[: request.num_prompt_tokens], variant.block_size)


class _Replica:
    """An engine that has come as far as `at`."""

    def __init__(self, variant: Variant, engine: ReplayEngine, routing_hash: RoutingHash) -> None:
        self.engine, self.at = engine, 0.0
        self._published = PublishedPrefixes(routing_hash, variant.windows)
        engine.prefixes.index.watchers.append(self._published)

    def stats(self) -> dict[str, Any]:
        """What a replica tells."""
        engine, variant = self.engine, self.engine.variant
        return stats_to_tell(
            self._published.hottest(), engine.num_requests, engine.scheduler.num_running, variant.max_num_seqs,
            variant.max_num_queued_requests, engine.pool,
        )  # fmt: skip


def _at(replica: _Replica) -> float:
    return replica.at
