"""A router's state beside the engine that calls it: what replicas tell, what was sent to them, and the choice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hfpaged.replicas.affinity import Candidate, Thresholds, ranked
from hfpaged.replicas.recent_prefixes import MEMORY_SECONDS, RecentPrefixes
from hfpaged.replicas.routing_hash import as_numbers
from hfpaged.replicas.routing_stats import RoutingStats, read_stats


class Routing:
    """Of one process that sends requests. `clock` gives seconds, `memory_seconds` see RecentPrefixes."""

    def __init__(
        self, thresholds: Thresholds | None = None, *, memory_seconds: float = MEMORY_SECONDS,
        clock: Callable[[], float], rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._thresholds, self._clock = thresholds or Thresholds(), clock
        self._recent = RecentPrefixes(memory_seconds)
        self._rng = rng or random.Random()
        self._told: dict[str, tuple[Any, RoutingStats]] = {}  # what was read, and from what

    def choose(self, hashes: bytes, told: Mapping[str, Any], loads: Mapping[str, int | None]) -> list[str]:
        """Replicas for a prompt with these hashes, the best first, which is taken for the one that gets it: others who
        begin so shall follow it, before it has told of it.

        `told` are routing stats by replica; `loads` requests there as far as they are known, else its stats say.
        """
        depths = {each: depth for depth, each in enumerate(as_numbers(hashes), 1)}
        now = self._clock()
        candidates = [self._candidate(name, told[name], loads.get(name), depths, now) for name in told]
        best = [each.name for each in ranked(candidates, len(depths), self._thresholds, self._rng)]
        if best:
            self._recent.note(best[0], depths, now)
        return best

    def sent(self, hashes: bytes, replica: str) -> None:
        """It was the one that got it, as the first one need not have had room."""
        self._recent.note(replica, as_numbers(hashes), self._clock())

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all others: they have gone."""
        self._recent.keep(replicas)
        self._told = {name: told for name, told in self._told.items() if name in replicas}

    def _candidate(self, name: str, told: Any, load: int | None, depths: Mapping[int, int], now: float) -> Candidate:
        stats = self._stats(name, told)
        return Candidate(
            name,
            self._recent.matched(name, depths, stats.prefixes, now),
            stats.running + stats.waiting if load is None else load,
            stats.seats,
            stats.most or math.inf,
            stats.free,
            self._recent.placed(name, now),
        )

    def _stats(self, name: str, told: Any) -> RoutingStats:
        """Read once for each time that they are told."""
        read = self._told.get(name)
        if read is None or read[0] is not told:
            self._told[name] = read = told, read_stats(told)
        return read[1]
