"""All metrics: their names, kinds, helps, labels and buckets. Each has the label `model_name` besides.

Names follow Prometheus's rules (`promtool check metrics`): base units, counters end in `_total`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hfpaged.engine import buckets

Kind = Literal["gauge", "counter", "histogram", "info"]


class Metric(NamedTuple):
    """`name` without the suffixes that an exposition adds to histograms; counters have their `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    # The pools, read when somebody asks.
    Metric(
        "hfpaged_kv_usage_ratio",
        "gauge",
        "Blocks that sequences hold (used, reserved) as a part of all blocks of the pool, of the fullest one.",
    ),
    Metric(
        "hfpaged_kv_blocks",
        "gauge",
        "Blocks by state: used, cached (evictable), free, reserved; in sum all.",
        ("state",),
    ),
    Metric("hfpaged_kv_shared_blocks", "gauge", "Used blocks that two or more sequences hold."),
    Metric(
        "hfpaged_kv_group_blocks",
        "gauge",
        "Blocks of layer groups (full, window_128 ...) by state: used, cached.",
        ("layer_group", "state"),
    ),
    Metric(
        "hfpaged_kv_bytes",
        "gauge",
        "Bytes by kind: capacity of all blocks, reserved by tensors, live (tokens), wasted.",
        ("kind",),
    ),
    Metric("hfpaged_kv_tokens", "gauge", "Tokens stored in used blocks, shared ones once, mean over the layer groups."),
    Metric(
        "hfpaged_kv_unfilled_slots", "gauge", "Slots of used blocks that hold no live token: internal fragmentation."
    ),
    Metric("hfpaged_kv_unfilled_ratio", "gauge", "Unfilled slots as a part of all slots of used blocks."),
    Metric(
        "hfpaged_kv_pool_info",
        "info",
        "Format and sizes of the pool.",
        ("kv_format", "block_size", "num_blocks", "layer_groups"),
    ),
    Metric("hfpaged_kv_evicted_blocks_total", "counter", "Cached blocks of known prefixes that had to make room."),
    Metric(
        "hfpaged_kv_events_total",
        "counter",
        "Block events for routers by event: stored, removed, cleared were published, dropped ones told anew.",
        ("event",),
    ),
    # What lies below the pools: only where there is swap space or a prefix store.
    Metric(
        "hfpaged_kv_swapped_blocks_total",
        "counter",
        "Evicted blocks by what became of them: out, kept (they lay there still), in (came back), dropped.",
        ("direction",),
    ),
    Metric("hfpaged_kv_swapped_bytes_total", "counter", "Bytes copied out of the pool, and in again.", ("direction",)),
    Metric("hfpaged_kv_swap_seconds_total", "counter", "Seconds that these copies took.", ("direction",)),
    Metric("hfpaged_kv_restored_tokens_total", "counter", "Prompt tokens that came back and were not computed."),
    Metric(
        "hfpaged_kv_restores_declined_total",
        "counter",
        "Lookups for which not all came back: computing was cheaper (cost), or there were no blocks for it (room).",
        ("reason",),
    ),
    Metric("hfpaged_kv_swap_space_blocks", "gauge", "Blocks that host memory has room for: used, free.", ("state",)),
    Metric("hfpaged_prefix_queried_tokens_total", "counter", "Prompt tokens that were looked up, once per request."),
    Metric(
        "hfpaged_prefix_hit_tokens_total", "counter", "Prompt tokens that were found and not computed: what was saved."
    ),
    Metric("hfpaged_prefix_hash_collisions_total", "counter", "Blocks of equal hash and unequal tokens."),
    Metric("hfpaged_prefix_lookups_total", "counter", "Lookups by why they ended: complete, or why not.", ("reason",)),
    Metric(
        "hfpaged_prefix_store_blocks_total",
        "counter",
        "Blocks of the prefix store by event: written, read, dropped (not written), damaged and failed (not read).",
        ("event",),
    ),
    Metric("hfpaged_prefix_store_bytes_total", "counter", "Bytes written to and read from it.", ("event",)),
    Metric("hfpaged_prefix_store_seconds_total", "counter", "Seconds that this took, beside the steps.", ("event",)),
    Metric("hfpaged_prefix_store_files", "gauge", "Files in the directory, of all services, when it was last read."),
    Metric("hfpaged_prefix_store_used_bytes", "gauge", "Their bytes."),
    # Requests of batchers.
    Metric("hfpaged_requests_received_total", "counter", "Requests that came, refused ones too."),
    Metric("hfpaged_requests_rejected_total", "counter", "Requests that were refused before they waited.", ("reason",)),
    Metric(
        "hfpaged_requests_finished_total", "counter", "Requests that ended: stop, length or error.", ("finish_reason",)
    ),
    Metric("hfpaged_requests_aborted_total", "counter", "Requests that were given up by who brought them."),
    Metric("hfpaged_requests_running", "gauge", "Requests that hold blocks."),
    Metric("hfpaged_requests_waiting", "gauge", "Requests that hold no blocks, preempted ones among them."),
    Metric("hfpaged_requests_preempted", "gauge", "Requests that wait because their blocks were taken back."),
    Metric("hfpaged_preemptions_total", "counter", "Times that blocks were taken back from a running sequence."),
    Metric("hfpaged_preempted_tokens_total", "counter", "Stored tokens that were in those blocks."),
    Metric("hfpaged_prompt_tokens_total", "counter", "Prompt tokens of requests that were admitted."),
    Metric(
        "hfpaged_computed_tokens_total",
        "counter",
        "Tokens that went through the model by phase: prefill, decode.",
        ("phase",),
    ),
    Metric("hfpaged_generated_tokens_total", "counter", "Tokens that were sampled."),
    Metric(
        "hfpaged_wait_seconds_total",
        "counter",
        "Seconds that requests waited for blocks, seats, budget, prefix, turn.",
        ("cause",),
    ),
    Metric(
        "hfpaged_kv_byte_seconds_total",
        "counter",
        "Memory of ended requests integrated over time, shared parts divided.",
    ),
    Metric(
        "hfpaged_request_duration_seconds",
        "histogram",
        "From arrival to the end, aborted ones too.",
        (),
        buckets.DURATION,
    ),
    Metric(
        "hfpaged_request_queue_seconds",
        "histogram",
        "From arrival to the first admission or the end before it.",
        (),
        buckets.DURATION,
    ),
    Metric("hfpaged_request_prompt_tokens", "histogram", "Prompt tokens of ended requests.", (), buckets.LENGTH),
    Metric("hfpaged_request_output_tokens", "histogram", "New tokens of ended requests.", (), buckets.LENGTH),
    Metric("hfpaged_sequence_tokens", "histogram", "Prompt and new tokens of ended sequences.", (), buckets.LENGTH),
    Metric(
        "hfpaged_time_to_first_token_seconds", "histogram", "From arrival to the first token.", (), buckets.FIRST_TOKEN
    ),
    Metric(
        "hfpaged_inter_token_latency_seconds", "histogram", "Between two tokens of a request.", (), buckets.PER_TOKEN
    ),
    Metric(
        "hfpaged_time_per_output_token_seconds",
        "histogram",
        "Mean time of each token behind the first of a request.",
        (),
        buckets.PER_TOKEN,
    ),
    # Steps.
    Metric(
        "hfpaged_step_duration_seconds",
        "histogram",
        "Steps that only decode, and those with prompt tokens (prefill).",
        ("phase",),
        buckets.STEP,
    ),
    Metric(
        "hfpaged_step_tokens",
        "histogram",
        "Tokens of a step by phase, where it has any.",
        ("phase",),
        buckets.STEP_TOKENS,
    ),
    Metric("hfpaged_step_sequences", "histogram", "Sequences in a step.", (), buckets.STEP_TOKENS),
    Metric(
        "hfpaged_step_seconds_total", "counter", "Seconds of steps by part: forward, sampling, scheduling.", ("part",)
    ),
    Metric("hfpaged_last_step_timestamp_seconds", "gauge", "When the last step ended."),
    Metric(
        "hfpaged_stalled_seconds",
        "gauge",
        "Seconds that an engine has requests and ends no step, of the one where it is longest; 0 while all go on.",
    ),
    Metric(
        "hfpaged_engine_limit",
        "gauge",
        "max_num_seqs, max_num_batched_tokens, max_model_len of the engine.",
        ("limit",),
    ),
    # Shadow decoding: a sample of requests computed once more with the native cache. Only where it is on.
    Metric(
        "hfpaged_shadow_requests_total",
        "counter",
        "Requests that were computed once more with the native KV cache.",
        ("kv_format",),
    ),
    Metric("hfpaged_shadow_tokens_total", "counter", "Tokens of theirs that were compared.", ("kv_format",)),
    Metric(
        "hfpaged_shadow_top1_agreed_tokens_total",
        "counter",
        "Compared tokens where the live and the native distribution have the same likeliest token.",
        ("kv_format",),
    ),
    Metric(
        "hfpaged_shadow_kl",
        "histogram",
        "KL divergence of next-token distributions, native || live, in nats, by compared token.",
        ("kv_format",),
        buckets.DIVERGENCE,
    ),
    Metric(
        "hfpaged_shadow_dropped_total",
        "counter",
        "Requests that were drawn and not compared, by reason.",
        ("kv_format", "reason"),
    ),
    Metric("hfpaged_shadow_seconds_total", "counter", "Seconds that it took of the engine's thread.", ("kv_format",)),
    # generate() with a PagedCache.
    Metric("hfpaged_generate_calls_total", "counter", "Calls of generate() that ended: finished, error.", ("outcome",)),
    Metric("hfpaged_generate_running", "gauge", "Calls of generate() under way."),
    Metric(
        "hfpaged_generate_tokens_total", "counter", "Tokens of ended calls by kind: prompt, cached, output.", ("kind",)
    ),
    Metric("hfpaged_generate_duration_seconds", "histogram", "Calls of generate().", (), buckets.DURATION),
    Metric(
        "hfpaged_generate_time_to_first_token_seconds",
        "histogram",
        "From the call to its first token.",
        (),
        buckets.FIRST_TOKEN,
    ),
    # Beside them.
    Metric(
        "hfpaged_dense_fallbacks_total", "counter", "Attention calls that took the dense path, by reason.", ("reason",)
    ),
    Metric(
        "hfpaged_device_memory_bytes",
        "gauge",
        "Memory by kind: total, free, reserved, allocated, peak; of a CPU the resident set is allocated.",
        ("device", "kind"),
    ),
    Metric("hfpaged_model_weights_bytes", "gauge", "Bytes of the weights and buffers of the model.", ("device",)),
)

BY_NAME = {metric.name: metric for metric in METRICS}
