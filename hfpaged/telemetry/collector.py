"""All figures are read when somebody asks: of one batcher and its pool, or of the whole process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpaged.engine import registry
from hfpaged.live_pools import live_pools, pool_counts
from hfpaged.telemetry.batcher_readings import read_batcher, read_tally
from hfpaged.telemetry.device_readings import read_devices
from hfpaged.telemetry.generate_tally import GENERATE
from hfpaged.telemetry.pool_readings import read_pool_counts, read_pools
from hfpaged.telemetry.readings import Readings

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher


def read_all() -> Readings:
    """Of the whole process, what is gone counted too."""
    readings, batchers, pools = Readings(), registry.live_batchers(), live_pools()
    for name, tally in registry.tallies().items():
        read_tally(readings, name, tally)
    for batcher in batchers:
        read_batcher(readings, batcher)
    read_pools(readings, pools)
    read_pool_counts(readings, pool_counts())
    read_devices(readings, pools)
    GENERATE.read(readings)
    return readings


def read_one(batcher: ContinuousBatcher) -> Readings:
    """Of one batcher and its pool; what other caches on that pool do there is among it."""
    readings, name, pool = Readings(), batcher.tally.model_name, batcher.pool
    read_tally(readings, name, batcher.tally)
    read_batcher(readings, batcher)
    read_pools(readings, [pool], name)
    read_pool_counts(readings, {name: pool.counts})
    read_devices(readings, [pool], name)
    return readings
