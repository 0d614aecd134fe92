"""Where the numbers of a watch come from. Nothing that is watched is kept alive, changed or made to wait."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hfpaged.cache import PagedCache
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.engine.events import Aborted, Event, Failed, Finished, StepFinished
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_pool import KVPool


@dataclass(frozen=True)
class Reading:
    """One look. Blocks as in `pool.stats()`; all counts but those of blocks and requests grow from look to look.

    decode_tokens   of a batcher those that were chosen, of a cache or a pool those that were stored one at a time
    busy_seconds    that steps took, None where nobody says so
    running         requests, as `waiting` and `ended`; None where there are none
    """

    time: float
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    bytes_used: int
    prefix_queries: int
    prefix_hits: int
    prefill_tokens: int
    decode_tokens: int
    busy_seconds: float | None = None
    peak_blocks: int = 0
    running: int | None = None
    waiting: int | None = None
    ended: int | None = None
    preemptions: int | None = None


class PoolSource:
    """A cache or a pool. The counts outlive it, so that the last look is exact; of its blocks the last ones stay."""

    kind = "pool"

    def __init__(self, watched: Any, pool: KVPool) -> None:
        self._watched, self._pool = weakref.ref(watched), weakref.ref(pool)
        self._tokens, self._prefixes = pool.manager.counts, pool.prefixes.index.counts
        self._blocks: dict[str, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing can come any more."""
        return self._watched() is None

    def read(self, time: float) -> Reading:
        """As it is now."""
        self._look_at_blocks()
        return Reading(
            time, prefix_queries=self._prefixes.queries, prefix_hits=self._prefixes.hits, **self._blocks,
            **self._counts(),
        )  # fmt: skip

    def close(self) -> None:
        """No more looks."""

    def _counts(self) -> dict[str, Any]:
        return {"prefill_tokens": self._tokens.prefill, "decode_tokens": self._tokens.decode}

    def _look_at_blocks(self) -> None:
        """Without the pool's lock, for which nobody who computes shall wait: in the middle of a change one block may
        be missing for a moment.
        """
        pool = self._pool()
        if pool is not None:
            stats = pool.blocks.stats
            self._blocks = {
                "blocks_total": stats.total, "blocks_used": stats.used, "blocks_cached": stats.cached,
                "blocks_free": stats.free, "bytes_used": stats.used * pool.storage.block_bytes,
            }  # fmt: skip


class CacheSource(PoolSource):
    kind = "cache"


class BatcherSource(PoolSource):
    """A batcher, whose steps are counted by a hook."""

    kind = "batcher"

    def __init__(self, batcher: ContinuousBatcher) -> None:
        super().__init__(batcher, batcher.pool)
        self._steps = StepCounts()
        batcher.hooks.append(self._steps)

    @property
    def is_over(self) -> bool:
        batcher = self._watched()
        return batcher is None or batcher.is_closed

    def close(self) -> None:
        """Take the hook away."""
        batcher = self._watched()
        if batcher is not None:
            with suppress(ValueError):  # somebody else has cleared them
                batcher.hooks.remove(self._steps)

    def _counts(self) -> dict[str, Any]:
        return vars(self._steps).copy()


class StepCounts:
    """A hook: what the events of one batcher add up to."""

    def __init__(self) -> None:
        self.prefill_tokens = self.decode_tokens = self.preemptions = 0
        self.running = self.waiting = self.ended = self.peak_blocks = 0
        self.busy_seconds = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.prefill_tokens += event.num_prefill_tokens
            self.decode_tokens += event.num_sampled
            self.preemptions += event.preemptions
            self.running, self.waiting = event.num_running, event.num_waiting
            self.peak_blocks = max(self.peak_blocks, event.blocks_used)
            self.busy_seconds += event.seconds
        elif isinstance(event, (Finished, Aborted, Failed)):
            self.ended += 1


def source_of(watched: Any) -> PoolSource:
    """Raises InvalidConfigError for what cannot be watched."""
    if isinstance(watched, ContinuousBatcher):
        return BatcherSource(watched)
    if isinstance(watched, PagedCache):
        return CacheSource(watched, watched.pool)
    if isinstance(watched, KVPool):
        return PoolSource(watched, watched)
    raise InvalidConfigError(
        f"watch() was given a {type(watched).__name__}; give a PagedCache, a ContinuousBatcher or a KVPool"
    )
