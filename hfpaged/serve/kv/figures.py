"""Sections of /v1/kv/stats that are the numbers of /metrics, in the shape in which a page wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfpaged.engine import tally_keys as keys
from hfpaged.engine.sums import Key, Sums
from hfpaged.kv_pool import KVPool

Numbers = Mapping[Key, float]


def pool_figures(numbers: Numbers, pool: KVPool) -> dict[str, Any]:
    """Blocks by state, which in sum are all; `shared` ones are used ones."""
    blocks = {state: _whole(numbers, "hfpaged_kv_blocks", state) for state in ("used", "cached", "free", "reserved")}
    return {
        "kv_format": pool.kv_format.title,
        "block_size": pool.block_size,
        "block_bytes": pool.storage.block_bytes,
        "blocks": {"total": sum(blocks.values()), "shared": _whole(numbers, "hfpaged_kv_shared_blocks"), **blocks},
        "bytes": {
            kind: _whole(numbers, "hfpaged_kv_bytes", kind) for kind in ("capacity", "reserved", "live", "wasted")
        },
        "usage_ratio": numbers.get(("hfpaged_kv_usage_ratio",), 0.0),
        "tokens": _whole(numbers, "hfpaged_kv_tokens"),
        "unfilled_slots": _whole(numbers, "hfpaged_kv_unfilled_slots"),
        "evicted_blocks_total": _whole(numbers, "hfpaged_kv_evicted_blocks_total"),
    }


def prefix_figures(numbers: Numbers) -> dict[str, Any]:
    """Since the start: tokens looked up and found, and why lookups ended."""
    queried = _whole(numbers, "hfpaged_prefix_queried_tokens_total")
    hit = _whole(numbers, "hfpaged_prefix_hit_tokens_total")
    return {
        "queried_tokens_total": queried,
        "hit_tokens_total": hit,
        "hit_rate": hit / queried if queried else None,
        "lookups_total": _by_label(numbers, keys.LOOKUPS),
    }


def totals(numbers: Numbers) -> dict[str, Any]:
    """Counters since the start."""
    return {
        "requests_received": _whole(numbers, *keys.RECEIVED),
        "requests_finished": _by_label(numbers, keys.FINISHED),
        "requests_aborted": _whole(numbers, *keys.ABORTED),
        "requests_rejected": _by_label(numbers, keys.REJECTED),
        "preemptions": _whole(numbers, *keys.PREEMPTIONS),
        "prompt_tokens": _whole(numbers, *keys.PROMPT_TOKENS),
        "computed_tokens": _by_label(numbers, keys.COMPUTED_TOKENS),
        "generated_tokens": _whole(numbers, *keys.GENERATED_TOKENS),
    }


def latency_totals(sums: Sums) -> dict[str, dict[str, float]]:
    """Of the histograms since the start: how many values, and their sum in seconds."""
    found = {"time_to_first_token": keys.FIRST_TOKEN, "inter_token": keys.INTER_TOKEN}
    return {
        name: {"count_total": sums.histograms[key].count, "sum_total": sums.histograms[key].sum}
        for name, key in found.items()
        if key in sums.histograms
    }


def _whole(numbers: Numbers, *key: str) -> int:
    return int(numbers.get(key, 0))


def _by_label(numbers: Numbers, metric: str) -> dict[str, int]:
    return {key[1]: int(value) for key, value in numbers.items() if key[0] == metric and len(key) == 2}
