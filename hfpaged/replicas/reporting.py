"""What a replica tells of itself to those who send requests to it."""

from __future__ import annotations

from typing import Any

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.replicas.published import PublishedPrefixes, unwatch_prefixes, watch_prefixes
from hfpaged.replicas.routing_hash import RoutingHash
from hfpaged.replicas.routing_stats import stats_to_tell


class Reporter:
    """Of the replica around `batcher`: `stats` is what its `record_routing_stats` gives back. `secret` is that of the
    salts, the same on all replicas and all ingresses. So many requests may wait as `most_queued` says, None for any
    number.
    """

    def __init__(self, batcher: ContinuousBatcher, secret: bytes, most_queued: int | None = None) -> None:
        self._batcher, self._most_queued = batcher, most_queued
        self._published: PublishedPrefixes = watch_prefixes(batcher.pool, RoutingHash(secret))

    def stats(self) -> dict[str, Any]:
        """See `RoutingStats`. From any thread; it takes some milliseconds where the pool is large."""
        batcher = self._batcher
        running = len(batcher.requests_with_blocks())
        return stats_to_tell(
            self._published.hottest(), len(batcher.loop.requests), running, batcher.limits["max_num_seqs"],
            self._most_queued, batcher.pool.blocks,
        )  # fmt: skip

    def close(self) -> None:
        """Follow the pool no more."""
        unwatch_prefixes(self._batcher.pool, self._published)
