"""What pools hold now, and what they have counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hfpaged.engine.sums import Sums
from hfpaged.engine.tally_keys import label
from hfpaged.live_pools import PoolCounts
from hfpaged.store_counts import StoreCounts
from hfpaged.telemetry.readings import Readings
from hfpaged.telemetry.swap_readings import read_swaps

if TYPE_CHECKING:
    from hfpaged.block_pool import PoolStats
    from hfpaged.kv_pool import KVPool
    from hfpaged.layer_groups import LayerGroup

# Slots of all used blocks: what the unfilled ones are a part of.
_USED_SLOTS = ("used slots",)


def read_pools(readings: Readings, pools: Iterable[KVPool], name: str | None = None) -> None:
    """Those that are there now, each under the name of the model that used it first, or all under `name`."""
    for pool in pools:
        _read_pool(readings, pool, pool.counts.model_name if name is None else name)
    for sums in readings.models.values():
        _add_unfilled_ratio(sums)


def read_pool_counts(readings: Readings, counts: Mapping[str, PoolCounts]) -> None:
    """What they have counted, by the name of the model."""
    for name, counted in counts.items():
        prefixes = counted.prefixes
        readings.count(name, "hfpaged_kv_evicted_blocks_total", prefixes.evictions)
        readings.count(name, "hfpaged_prefix_queried_tokens_total", prefixes.queries)
        readings.count(name, "hfpaged_prefix_hit_tokens_total", prefixes.hits)
        readings.count(name, "hfpaged_prefix_hash_collisions_total", prefixes.collisions)
        if counted.swaps is not None:
            read_swaps(readings, name, counted.swaps)
        _count_store(readings, name, counted.store)
        for reason, calls in list(counted.dense_calls.items()):
            readings.count(name, "hfpaged_dense_fallbacks_total", calls, label(reason))
        for event, times in list(counted.block_events.items()):
            readings.count(name, "hfpaged_kv_events_total", times, event)


def _count_store(readings: Readings, name: str, store: StoreCounts) -> None:
    for event in ("written", "read", "dropped", "damaged", "failed"):
        if blocks := getattr(store, event):
            readings.count(name, "hfpaged_prefix_store_blocks_total", blocks, event)
    for event, size, seconds in (
        ("written", store.bytes_written, store.write_seconds),
        ("read", store.bytes_read, store.read_seconds),
    ):
        if size:
            readings.count(name, "hfpaged_prefix_store_bytes_total", size, event)
            readings.count(name, "hfpaged_prefix_store_seconds_total", seconds, event)


def _read_pool(readings: Readings, pool: KVPool, name: str) -> None:
    from hfpaged.pool_contents import read_pool

    now, sums = read_pool(pool), readings.of(name)
    states = _by_state(now.blocks)
    for state, blocks in states.items():
        sums.count(("hfpaged_kv_blocks", state), blocks)
    sums.count(("hfpaged_kv_shared_blocks",), now.blocks.shared)
    for group in now.groups:
        for state, blocks in (("used", group.used), ("cached", group.cached)):
            sums.count(("hfpaged_kv_group_blocks", group_name(group.group), state), blocks)
    total, used = now.blocks.total, now.blocks.used
    sizes = {
        "capacity": total * now.block_bytes, "reserved": now.reserved_bytes, "live": now.live_bytes,
        "wasted": max(used * now.block_bytes - now.live_bytes, 0),
    }  # fmt: skip
    for kind, size in sizes.items():
        sums.count(("hfpaged_kv_bytes", kind), size)
    sums.count(("hfpaged_kv_tokens",), now.tokens // max(len(now.groups), 1))
    sums.count(("hfpaged_kv_unfilled_slots",), max(now.unfilled_slots, 0))
    # Of several pools the fullest one counts: another that is empty is no help to those who wait for blocks.
    held = states["used"] + states["reserved"]
    readings.most(name, "hfpaged_kv_usage_ratio", held / total if total else 0.0)
    sums.count(_USED_SLOTS, used * now.block_size)
    if pool.swapping is not None and pool.swapping.lower is not None:
        files, size = pool.swapping.lower.holds
        readings.most(name, "hfpaged_prefix_store_files", files)
        readings.most(name, "hfpaged_prefix_store_used_bytes", size)
    # Free memory differs from pool to pool, and each number would be one more series.
    num_blocks = str(total) if pool.is_sized_by_user else "by free memory"
    if pool.swapping is not None and pool.swapping.host is not None:
        host = pool.swapping.host
        sums.count(("hfpaged_kv_swap_space_blocks", "used"), host.num_blocks)
        sums.count(("hfpaged_kv_swap_space_blocks", "free"), host.num_places - host.num_blocks)
    info = (pool.kv_format.title, str(now.block_size), num_blocks, str(len(now.groups)))
    readings.most(name, "hfpaged_kv_pool_info", 1, *info)


def group_name(group: LayerGroup) -> str:
    """What layers of a group see."""
    return "full" if group.window is None else f"window_{group.window}"


def _by_state(blocks: PoolStats) -> dict[str, int]:
    """In sum all."""
    rest = max(blocks.total - blocks.used - blocks.cached, 0)
    reserved = min(blocks.reserved, rest)
    return {"used": blocks.used, "cached": blocks.cached, "free": rest - reserved, "reserved": reserved}


def _add_unfilled_ratio(sums: Sums) -> None:
    numbers = sums.numbers
    if _USED_SLOTS in numbers:
        slots, unfilled = numbers[_USED_SLOTS], numbers["hfpaged_kv_unfilled_slots",]
        numbers["hfpaged_kv_unfilled_ratio",] = unfilled / slots if slots else 0.0
