"""What spans say of requests and calls. Never the text of a prompt, and nothing that was made of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.util.types import AttributeValue

from hfpaged.telemetry import conventions as names

if TYPE_CHECKING:
    from hfpaged.engine.events import Arrived, PrefixMatched
    from hfpaged.engine.outputs import RequestMetrics
    from hfpaged.engine.params import RequestParams
    from hfpaged.generation_events import GenerationCall, GenerationEnded, GenerationPrefilled

Attributes = dict[str, AttributeValue]

# The variable that all instrumentations of generative AI read. Stop strings are the one thing here that a client wrote.
CAPTURE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def captures_content() -> bool:
    """Whether the process was told to put what clients wrote into spans."""
    return os.environ.get(CAPTURE_CONTENT, "").strip().lower() in ("true", "1", "span_only", "span_and_event")


def common(operation: str, model_name: str, kv_format: str) -> Attributes:
    """Of all spans that stand for a request or a call."""
    return {
        names.OPERATION_NAME: operation,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: model_name,
        names.RESPONSE_MODEL: model_name,
        names.KV_FORMAT: kv_format,
    }


def of_arrival(event: Arrived, with_content: bool) -> Attributes:
    """What a request asks for."""
    found: Attributes = {names.RESPONSE_ID: event.request_id, names.USAGE_INPUT_TOKENS: event.prompt_tokens}
    if event.tenant:
        found[names.TENANT] = event.tenant
    if event.priority:
        found[names.PRIORITY] = event.priority
    if event.adapter:
        found[names.ADAPTER] = event.adapter
    found.update(_of_params(event.params))
    if with_content and event.params.stop_strings:
        found[names.REQUEST_STOP_SEQUENCES] = event.params.stop_strings
    return found


def _of_params(params: RequestParams) -> Attributes:
    found: Attributes = {names.REQUEST_MAX_TOKENS: params.max_new_tokens}
    if params.do_sample:
        found |= _sampling(vars(params.config))
        if params.seed is not None:
            found[names.REQUEST_SEED] = params.seed
    if params.n != 1:
        found[names.REQUEST_CHOICE_COUNT] = params.n
    if params.num_beams > 1:
        found[names.NUM_BEAMS] = params.num_beams
    if params.frequency_penalty:
        found[names.REQUEST_FREQUENCY_PENALTY] = params.frequency_penalty
    if params.presence_penalty:
        found[names.REQUEST_PRESENCE_PENALTY] = params.presence_penalty
    return found


def _sampling(settings: Mapping[str, float | int | None]) -> Attributes:
    found: Attributes = {}
    if (temperature := settings.get("temperature")) is not None:
        found[names.REQUEST_TEMPERATURE] = float(temperature)
    if (top_p := settings.get("top_p")) is not None and top_p < 1:
        found[names.REQUEST_TOP_P] = float(top_p)
    if top_k := settings.get("top_k"):
        found[names.REQUEST_TOP_K] = int(top_k)
    return found


def of_match(event: PrefixMatched | GenerationPrefilled, reason: str) -> Attributes:
    """What was found of a prompt, and why not more."""
    found: Attributes = {names.PREFIX_HIT_TOKENS: event.hit, names.PREFIX_QUERIED_TOKENS: event.queried}
    if reason and reason != "complete":
        found[names.PREFIX_MISS_REASON] = reason
    return found


def of_waits(waits: Mapping[str, float]) -> Attributes:
    """Seconds by cause."""
    return {names.WAIT + cause: seconds for cause, seconds in waits.items()}


def of_metrics(metrics: RequestMetrics) -> Attributes:
    """What a request took."""
    found: Attributes = {
        names.USAGE_CACHE_READ: metrics.cached_tokens,
        names.COMPUTED_TOKENS: metrics.computed_tokens,
        names.PREEMPTIONS: metrics.preemptions,
        **_memory(metrics.peak_blocks, metrics.peak_bytes, metrics.shared_bytes, metrics.byte_seconds),
        **of_waits(metrics.waits),
        **_latencies(metrics),
    }
    if metrics.draft_tokens:
        found |= {names.DRAFT_TOKENS: metrics.draft_tokens, names.ACCEPTED_TOKENS: metrics.accepted_tokens}
    return found


def _memory(blocks: int, peak: int, shared: int, byte_seconds: float) -> Attributes:
    return {
        names.KV_BLOCKS_PEAK: blocks,
        names.KV_BYTES_PEAK: peak,
        names.KV_BYTES_SHARED: shared,
        names.KV_BYTE_SECONDS: byte_seconds,
    }


def _latencies(metrics: RequestMetrics) -> Attributes:
    """Between the times that have come."""
    arrival, admitted, first, end = metrics[:4]
    times = {
        names.LATENCY_IN_QUEUE: (arrival, admitted),
        names.LATENCY_TIME_TO_FIRST_TOKEN: (arrival, first),
        names.RESPONSE_TIME_TO_FIRST_CHUNK: (arrival, first),
        names.LATENCY_IN_PREFILL: (admitted, first),
        names.LATENCY_IN_DECODE: (first, end),
        names.LATENCY_IN_INFERENCE: (admitted, end),
        names.LATENCY_E2E: (arrival, end),
    }
    return {name: b - a for name, (a, b) in times.items() if a is not None and b is not None}


def of_call(call: GenerationCall) -> Attributes:
    """What a call of generate() asks for."""
    found: Attributes = {names.USAGE_INPUT_TOKENS: call.prompt_tokens, names.ROWS: call.rows}
    settings = call.settings
    if (most := settings.get("max_new_tokens")) is not None:
        found[names.REQUEST_MAX_TOKENS] = int(most)
    if settings.get("do_sample"):
        found |= _sampling(settings)
    if (count := settings.get("num_return_sequences", 1)) != 1:
        found[names.REQUEST_CHOICE_COUNT] = int(count)
    if (beams := settings.get("num_beams", 1)) > 1:
        found[names.NUM_BEAMS] = int(beams)
    return found


def of_call_end(event: GenerationEnded) -> Attributes:
    """What a call of generate() took."""
    found: Attributes = {
        names.FORWARDS: event.forwards,
        **_memory(event.peak_blocks, event.peak_bytes, event.shared_bytes, event.byte_seconds),
        names.LATENCY_E2E: event.time - event.call.began,
    }
    if event.error is None:
        found[names.USAGE_OUTPUT_TOKENS] = event.output_tokens
    if event.first_token_time is not None:
        found[names.LATENCY_TIME_TO_FIRST_TOKEN] = event.first_token_time - event.call.began
    return found
