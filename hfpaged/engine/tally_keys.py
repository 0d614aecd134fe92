"""The names under which a batcher counts: those of the metrics, so that whoever exports them needs no table."""

from __future__ import annotations

import re
from collections.abc import Collection

from hfpaged.engine import buckets
from hfpaged.engine.sums import Key, Sums
from hfpaged.errors import BatcherClosedError, InvalidConfigError, QueueFullError, RequestTooLongError

RECEIVED: Key = ("hfpaged_requests_received_total",)
REJECTED = "hfpaged_requests_rejected_total"
FINISHED = "hfpaged_requests_finished_total"
ABORTED: Key = ("hfpaged_requests_aborted_total",)
PREEMPTIONS: Key = ("hfpaged_preemptions_total",)
PREEMPTED_TOKENS: Key = ("hfpaged_preempted_tokens_total",)
PROMPT_TOKENS: Key = ("hfpaged_prompt_tokens_total",)
COMPUTED_TOKENS = "hfpaged_computed_tokens_total"
GENERATED_TOKENS: Key = ("hfpaged_generated_tokens_total",)
WAIT_SECONDS = "hfpaged_wait_seconds_total"
BYTE_SECONDS: Key = ("hfpaged_kv_byte_seconds_total",)
LOOKUPS = "hfpaged_prefix_lookups_total"
STEP_SECONDS = "hfpaged_step_seconds_total"

SHADOW_REQUESTS = "hfpaged_shadow_requests_total"
SHADOW_TOKENS = "hfpaged_shadow_tokens_total"
SHADOW_AGREED = "hfpaged_shadow_top1_agreed_tokens_total"
SHADOW_KL = "hfpaged_shadow_kl"
SHADOW_DROPPED = "hfpaged_shadow_dropped_total"
SHADOW_SECONDS = "hfpaged_shadow_seconds_total"

DURATION: Key = ("hfpaged_request_duration_seconds",)
QUEUE: Key = ("hfpaged_request_queue_seconds",)
PROMPT_LENGTH: Key = ("hfpaged_request_prompt_tokens",)
OUTPUT_LENGTH: Key = ("hfpaged_request_output_tokens",)
SEQUENCE_LENGTH: Key = ("hfpaged_sequence_tokens",)
FIRST_TOKEN: Key = ("hfpaged_time_to_first_token_seconds",)
INTER_TOKEN: Key = ("hfpaged_inter_token_latency_seconds",)
PER_TOKEN: Key = ("hfpaged_time_per_output_token_seconds",)
STEP_DURATION = "hfpaged_step_duration_seconds"
STEP_TOKENS = "hfpaged_step_tokens"
STEP_SEQUENCES: Key = ("hfpaged_step_sequences",)

# What only others' names for our numbers want to know.
CACHED_TOKENS: Key = ("prompt tokens cached",)
ALL_STEP_TOKENS: Key = ("step tokens",)
PREFILL_TIME: Key = ("prefill time",)
DECODE_TIME: Key = ("decode time",)
RUN_TIME: Key = ("run time",)

PHASES = ("prefill", "decode")
CAUSES = ("blocks", "seats", "budget", "prefix", "turn")
PARTS = ("forward", "sampling", "scheduling")
DROPS = (
    "aborted", "failed", "beams", "memory", "backlog", "too_long", "adapter_lost", "not_finite", "stopped", "error",
)  # fmt: skip
REASONS = ("complete", "never_seen", "below_block_size", "evicted", "left_window", "other_key", "differs")

_REFUSALS: dict[type[BaseException], str] = {
    RequestTooLongError: "too_long",
    InvalidConfigError: "invalid",
    BatcherClosedError: "closed",
    QueueFullError: "queue_full",
}
_BOUNDS: dict[Key, tuple[float, ...]] = {
    DURATION: buckets.DURATION,
    QUEUE: buckets.DURATION,
    PROMPT_LENGTH: buckets.LENGTH,
    OUTPUT_LENGTH: buckets.LENGTH,
    SEQUENCE_LENGTH: buckets.LENGTH,
    FIRST_TOKEN: buckets.FIRST_TOKEN,
    INTER_TOKEN: buckets.PER_TOKEN,
    PER_TOKEN: buckets.PER_TOKEN,
    STEP_SEQUENCES: buckets.STEP_TOKENS,
    ALL_STEP_TOKENS: buckets.STEP_TOKENS,
    PREFILL_TIME: buckets.DURATION,
    DECODE_TIME: buckets.DURATION,
    RUN_TIME: buckets.DURATION,
    **{(STEP_DURATION, phase): buckets.STEP for phase in PHASES},
    **{(STEP_TOKENS, phase): buckets.STEP_TOKENS for phase in PHASES},
}


def label(words: str) -> str:
    """As the value of a label: "below block size" is below_block_size."""
    return re.sub(r"\W+", "_", words.lower()).strip("_")


def refusal(error: BaseException) -> str:
    """Why a request was refused, in a word."""
    for kind, reason in _REFUSALS.items():
        if isinstance(error, kind):
            return reason
    return label(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error"))) or "error"


def all_at_zero() -> Sums:
    """What a tally begins with."""
    sums = Sums()
    for key in (RECEIVED, ABORTED, PREEMPTIONS, PREEMPTED_TOKENS, PROMPT_TOKENS, GENERATED_TOKENS, BYTE_SECONDS,
                CACHED_TOKENS):  # fmt: skip
        sums.numbers[key] = 0
    labels: dict[str, Collection[str]] = {
        REJECTED: _REFUSALS.values(), FINISHED: ("stop", "length", "error"), COMPUTED_TOKENS: PHASES,
        WAIT_SECONDS: CAUSES, LOOKUPS: REASONS, STEP_SECONDS: PARTS,
    }  # fmt: skip
    for metric, values in labels.items():
        sums.name(metric, values)
    for key, bounds in _BOUNDS.items():
        sums.histogram(key, bounds)
    return sums


def shadow_at_zero(sums: Sums, kv_format: str) -> None:
    """Begin to count what shadow decoding finds: where there is none, these are not there."""
    for metric in (SHADOW_REQUESTS, SHADOW_TOKENS, SHADOW_AGREED, SHADOW_SECONDS):
        sums.name(metric, [kv_format])
    for reason in DROPS:
        sums.count((SHADOW_DROPPED, kv_format, reason), 0)
    sums.histogram((SHADOW_KL, kv_format), buckets.DIVERGENCE)
