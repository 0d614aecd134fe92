"""The text of a scrape, made from a few figures: those of a healthy engine, but for what a test says."""

from __future__ import annotations

import math

from hfpaged.telemetry.catalog import METRICS

GIB = 2**30
CLOCK = 1_800_000_000.0

# One request holds about 100 MiB; 16.5 of them run on average, and the pool of 2 GiB is 80 % full then. A number, or
# numbers by the value of the label (of several: a tuple). Histograms: (value, how often) pairs. None: not there at all.
HEALTHY = {
    "hfpaged_kv_usage_ratio": 0.8,
    "hfpaged_kv_blocks": {"used": 819, "cached": 105, "free": 100, "reserved": 0},
    "hfpaged_kv_shared_blocks": 40,
    "hfpaged_kv_group_blocks": {("0", "used"): 819, ("0", "cached"): 105},
    "hfpaged_kv_bytes": {"capacity": 2 * GIB, "reserved": 2 * GIB, "live": 1.6 * GIB, "wasted": 0.02 * GIB},
    "hfpaged_kv_tokens": 12_900,
    "hfpaged_kv_unfilled_slots": 204,
    "hfpaged_kv_unfilled_ratio": 0.015,
    "hfpaged_kv_pool_info": {("auto", "16", "1024", "1"): 1},
    "hfpaged_kv_evicted_blocks_total": 50,
    "hfpaged_kv_events_total": {},
    "hfpaged_prefix_queried_tokens_total": 500_000,
    "hfpaged_prefix_hit_tokens_total": 300_000,
    "hfpaged_prefix_hash_collisions_total": 0,
    "hfpaged_prefix_lookups_total": {"complete": 400, "differs": 550, "evicted": 20, "never_seen": 30},
    "hfpaged_prefix_store_blocks_total": {},
    "hfpaged_prefix_store_bytes_total": {},
    "hfpaged_prefix_store_seconds_total": {},
    "hfpaged_prefix_store_files": None,
    "hfpaged_prefix_store_used_bytes": None,
    "hfpaged_requests_received_total": 1012,
    "hfpaged_requests_rejected_total": {},
    "hfpaged_requests_finished_total": {"stop": 700, "length": 290},
    "hfpaged_requests_aborted_total": 10,
    "hfpaged_requests_running": 12,
    "hfpaged_requests_waiting": 0,
    "hfpaged_requests_preempted": 0,
    "hfpaged_preemptions_total": 5,
    "hfpaged_preempted_tokens_total": 1_000,
    "hfpaged_prompt_tokens_total": 500_000,
    "hfpaged_computed_tokens_total": {"prefill": 200_000, "decode": 250_000},
    "hfpaged_generated_tokens_total": 249_000,
    "hfpaged_wait_seconds_total": {"blocks": 50, "budget": 20, "prefix": 5, "turn": 25},
    "hfpaged_kv_byte_seconds_total": 0.8 * 2 * GIB * 600,
    "hfpaged_request_duration_seconds": [(10.0, 1000)],
    "hfpaged_request_queue_seconds": [(0.05, 1000)],
    "hfpaged_request_prompt_tokens": [(500, 1000)],
    "hfpaged_request_output_tokens": [(250, 1000)],
    "hfpaged_sequence_tokens": [(750, 1000)],
    "hfpaged_time_to_first_token_seconds": [(0.3, 1000)],
    "hfpaged_inter_token_latency_seconds": [(0.04, 248_000)],
    "hfpaged_time_per_output_token_seconds": [(0.04, 1000)],
    "hfpaged_step_duration_seconds": {"prefill": [(0.06, 3000)], "decode": [(0.035, 12_000)]},
    "hfpaged_step_tokens": {"prefill": [(66, 3000)], "decode": [(16.5, 15_000)]},
    "hfpaged_step_sequences": [(16.5, 15_000)],
    "hfpaged_step_seconds_total": {"forward": 480, "sampling": 30, "scheduling": 90},
    "hfpaged_last_step_timestamp_seconds": CLOCK - 1,
    "hfpaged_stalled_seconds": 0.03,
    "hfpaged_engine_limit": {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "max_model_len": 8192},
    "hfpaged_kv_swapped_blocks_total": {},
    "hfpaged_kv_swapped_bytes_total": {},
    "hfpaged_kv_swap_seconds_total": {},
    "hfpaged_kv_restored_tokens_total": None,
    "hfpaged_kv_restores_declined_total": {},
    "hfpaged_kv_swap_space_blocks": {},
    "hfpaged_shadow_requests_total": {},
    "hfpaged_shadow_tokens_total": {},
    "hfpaged_shadow_top1_agreed_tokens_total": {},
    "hfpaged_shadow_kl": {},
    "hfpaged_shadow_dropped_total": {},
    "hfpaged_shadow_seconds_total": {},
    "hfpaged_generate_calls_total": {"finished": 0, "error": 0},
    "hfpaged_generate_running": 0,
    "hfpaged_generate_tokens_total": {},
    "hfpaged_generate_duration_seconds": [],
    "hfpaged_generate_time_to_first_token_seconds": [],
    "hfpaged_dense_fallbacks_total": {},
    "hfpaged_device_memory_bytes": {
        ("cuda:0", "total"): 24 * GIB,
        ("cuda:0", "free"): 4.5 * GIB,
        ("cuda:0", "reserved"): 19 * GIB,
        ("cuda:0", "allocated"): 16 * GIB,
        ("cuda:0", "peak"): 18.5 * GIB,
    },
    "hfpaged_model_weights_bytes": {"cuda:0": 13 * GIB},
}


def exposition(model_name="tiny", changed=None, **more):
    """The text with other figures; of several labels only those that are given change. Names may lack "hfpaged_"."""
    figures = dict(HEALTHY)
    for key, value in {**(changed or {}), **more}.items():
        name = key if key.startswith("hfpaged_") else f"hfpaged_{key}"
        assert name in figures, name
        keeps = isinstance(value, dict) and isinstance(figures[name], dict) and "info" not in name
        figures[name] = {**figures[name], **value} if keeps else value
    return "".join(_family(metric, figures[metric.name], model_name) for metric in METRICS)


def _family(metric, figure, model_name):
    if figure is None:
        return ""
    kind = "gauge" if metric.kind == "info" else metric.kind
    lines = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {kind}"]
    for labels, value in _series(metric, figure):
        labels = {"model_name": model_name, **labels}
        if metric.kind == "histogram":
            lines += _histogram(metric, labels, value)
        else:
            lines.append(f"{metric.name}{_braces(labels)} {value}")
    return "\n".join(lines) + "\n"


def _series(metric, figure):
    if not metric.labels:
        return [({}, figure)]
    values = ((key if isinstance(key, tuple) else (key,), value) for key, value in figure.items())
    return [(dict(zip(metric.labels, key, strict=True)), value) for key, value in values if value is not None]


def _histogram(metric, labels, pairs):
    for bound in (*metric.buckets, math.inf):
        le = "+Inf" if math.isinf(bound) else repr(bound)
        count = sum(often for value, often in pairs if value <= bound)
        yield f"{metric.name}_bucket{_braces({**labels, 'le': le})} {count}"
    yield f"{metric.name}_sum{_braces(labels)} {sum(value * often for value, often in pairs)}"
    yield f"{metric.name}_count{_braces(labels)} {sum(often for _, often in pairs)}"


def _braces(labels):
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
