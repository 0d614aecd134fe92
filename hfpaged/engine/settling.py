"""What is done for those who wait before each step."""

from __future__ import annotations

import time

from hfpaged.engine.admitter import is_coming
from hfpaged.engine.scheduler import Scheduler
from hfpaged.kv_pool import KVPool

# Where there is nothing to compute, a step waits so long for blocks that are being read; others may come meanwhile.
MOMENT_SECONDS = 0.05


def settle_waiting(pool: KVPool, scheduler: Scheduler) -> None:
    """What other caches on the pool hold can be found, and so can, where nobody runs, what is read for who is next."""
    if not len(scheduler.waiting):
        return
    pool.settle_idle()
    if pool.swapping is None or pool.swapping.lower is None or scheduler.running:
        return
    until = time.monotonic() + MOMENT_SECONDS
    while (left := until - time.monotonic()) > 0 and _is_next_coming(pool, scheduler):
        pool.swapping.lower.wait(left)


def _is_next_coming(pool: KVPool, scheduler: Scheduler) -> bool:
    with pool.changing():
        group = next(iter(scheduler.waiting.in_order()), None)
        return group is not None and is_coming(pool.prefixes, group)
