"""What a replica tells of itself to those who send requests to it."""

from __future__ import annotations

from typing import Any

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.replicas.published import PublishedPrefixes, unwatch_prefixes, watch_prefixes
from hfpaged.replicas.routing_hash import RoutingHash


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
        batcher, blocks = self._batcher, self._batcher.pool.blocks
        running, seats = len(batcher.requests_with_blocks()), batcher.limits["max_num_seqs"]
        return {
            "prefixes": self._published.hottest(),
            "running": running,
            "waiting": max(len(batcher.loop.requests) - running, 0),
            "seats": seats,
            "most": None if self._most_queued is None else seats + self._most_queued,
            "free": blocks.num_free / blocks.num_blocks if blocks.num_blocks else 1.0,
        }

    def close(self) -> None:
        """Follow the pool no more."""
        unwatch_prefixes(self._batcher.pool, self._published)
