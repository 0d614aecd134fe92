"""All pools of this process, for those who watch them all, and what they count. It loads no torch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hfpaged.outliving import Outliving
from hfpaged.prefix_index import PrefixCounts
from hfpaged.store_counts import StoreCounts
from hfpaged.swap_counts import SwapCounts

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool


@dataclass(eq=False)
class PoolCounts:
    """What a pool has counted since it was made. `model_name` is that of the first model that used it, "" while none
    has; `dense_calls` are attention calls over a gathered, dense view of it, by reason; `block_events` what others were
    told of its blocks, by event; `swaps` None where no tier is below it.
    """

    prefixes: PrefixCounts = field(default_factory=PrefixCounts)
    swaps: SwapCounts | None = None
    store: StoreCounts = field(default_factory=StoreCounts)
    dense_calls: dict[str, int] = field(default_factory=dict)
    block_events: dict[str, int] = field(default_factory=dict)
    model_name: str = ""

    def add(self, other: PoolCounts) -> None:
        """Count what `other` has counted, too."""
        mine, theirs = self.prefixes, other.prefixes
        mine.queries += theirs.queries
        mine.hits += theirs.hits
        mine.evictions += theirs.evictions
        mine.collisions += theirs.collisions
        if other.swaps is not None:
            self.swaps = self.swaps or SwapCounts()
            self.swaps.add(other.swaps)
        self.store.add(other.store)
        for reason, count in list(other.dense_calls.items()):
            self.dense_calls[reason] = self.dense_calls.get(reason, 0) + count
        for event, count in list(other.block_events.items()):
            self.block_events[event] = self.block_events.get(event, 0) + count

    def owner_is_gone(self, time: float) -> None:
        """All is counted already."""

    def count_dense_call(self, reason: str) -> None:
        """Attention read a dense view."""
        self.dense_calls[reason] = self.dense_calls.get(reason, 0) + 1


_lock = threading.Lock()
_pools: weakref.WeakSet[KVPool] = weakref.WeakSet()
_counts: Outliving[PoolCounts] = Outliving(PoolCounts)
_is_on_trial: ContextVar[bool] = ContextVar("hfpaged_pools_on_trial", default=False)


def live_pools() -> list[KVPool]:
    """Those that are there, in no order."""
    with _lock:
        return list(_pools)


def pool_counts() -> dict[str, PoolCounts]:
    """What all pools have counted, those that are gone too, by the name of the model."""
    return _counts.sums()


def register(pool: KVPool) -> PoolCounts:
    """A new pool; it counts in these."""
    counts = PoolCounts(pool.prefixes.index.counts)
    if not _is_on_trial.get():
        with _lock:
            _pools.add(pool)
        _counts.keep(pool, counts)
    return counts


@contextmanager
def on_trial() -> Iterator[None]:
    """Pools that are made here, in this thread, serve to try something out: nobody is told of them."""
    token = _is_on_trial.set(True)
    try:
        yield
    finally:
        _is_on_trial.reset(token)
