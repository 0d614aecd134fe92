"""All rules, in order of importance: what stops requests, what holds all of them up, what is slower than it need be."""

from __future__ import annotations

from hfpaged.doctor.rules.device import memory_at_peak, weights_and_pool
from hfpaged.doctor.rules.fragmentation import block_size
from hfpaged.doctor.rules.kernels import dense_fallbacks
from hfpaged.doctor.rules.pool import pool_full, pool_nearly_full, pool_oversized, preemption_thrash
from hfpaged.doctor.rules.prefix import evicted_prefixes, low_hit_rate
from hfpaged.doctor.rules.progress import no_progress
from hfpaged.doctor.rules.quality import kv_format_costs
from hfpaged.doctor.rules.requests import aborted, failing, long_queue, rejected
from hfpaged.doctor.rules.rule import Rule
from hfpaged.doctor.rules.throughput import (
    budget_small,
    few_requests,
    prefill_bound,
    scheduling_bound,
    seats_taken,
)

RULES: tuple[Rule, ...] = (
    no_progress,
    memory_at_peak,
    weights_and_pool,
    failing,
    rejected,
    pool_full,
    preemption_thrash,
    kv_format_costs,
    seats_taken,
    budget_small,
    low_hit_rate,
    evicted_prefixes,
    dense_fallbacks,
    long_queue,
    scheduling_bound,
    prefill_bound,
    aborted,
    block_size,
    pool_nearly_full,
    pool_oversized,
    few_requests,
)
