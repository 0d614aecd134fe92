"""What replicas tell, and how it is read by those who choose among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hfpaged.block_pool import BlockPool
from hfpaged.replicas.routing_hash import as_numbers, hashes_in

STATS_SECONDS = 1.0  # from one report of a replica to the next


class RoutingStats(NamedTuple):
    """Of one replica.

    prefixes           routing hashes of blocks that requests can begin with there
    running, waiting   requests that hold blocks, and others
    seats              sequences that it computes at once, None where it has not said
    most               requests that it takes, None for any number
    free               the share of its pool that nobody holds; cached prefixes count as free
    """

    prefixes: frozenset[int] = frozenset()
    running: int = 0
    waiting: int = 0
    seats: int | None = None
    most: int | None = None
    free: float = 1.0


def stats_to_tell(
    prefixes: bytes, requests: int, running: int, seats: int, most_queued: int | None, blocks: BlockPool
) -> dict[str, Any]:
    """Of a replica with so many `requests`, `running` among them: see RoutingStats. So many may wait as `most_queued`
    says, None for any number.
    """
    return {
        "prefixes": prefixes,
        "running": running,
        "waiting": max(requests - running, 0),
        "seats": seats,
        "most": None if most_queued is None else seats + most_queued,
        "free": blocks.num_free / blocks.num_blocks if blocks.num_blocks else 1.0,
    }


def read_stats(told: Any) -> RoutingStats:
    """Of what `stats_to_tell` gives; whatever is something else is left out, as if the replica had not said it."""
    if not isinstance(told, Mapping):
        return RoutingStats()
    prefixes, free = told.get("prefixes"), told.get("free")
    return RoutingStats(
        prefixes=frozenset(as_numbers(hashes_in(prefixes) or b"")),
        running=_count(told.get("running")) or 0,
        waiting=_count(told.get("waiting")) or 0,
        seats=_count(told.get("seats")) or None,
        most=_count(told.get("most")) or None,
        free=float(free) if isinstance(free, (int, float)) and math.isfinite(free) else 1.0,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
