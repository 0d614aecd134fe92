"""Names of OpenTelemetry's conventions for generative AI, and our own beside them.

The conventions are in development, and the constants of opentelemetry-semantic-conventions for them are deprecated: so
they are written down here.
"""

from __future__ import annotations

PROVIDER = "hfpaged"  # the well-known providers have none for a model in one's own process

# Operations.
TEXT_COMPLETION = "text_completion"
CHAT = "chat"

# Attributes of the conventions.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_STOP_SEQUENCES = "gen_ai.request.stop_sequences"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

# Not of the conventions; vLLM and SGLang set them, and dashboards read them.
LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_IN_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_IN_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_IN_INFERENCE = "gen_ai.latency.time_in_model_inference"

# Our own: the KV cache has no convention.
KV_FORMAT = "hfpaged.kv.format"
KV_BLOCKS_PEAK = "hfpaged.kv.blocks_peak"
KV_BYTES_PEAK = "hfpaged.kv.bytes_peak"
KV_BYTES_SHARED = "hfpaged.kv.bytes_shared"
KV_BYTE_SECONDS = "hfpaged.kv.byte_seconds"
PREFIX_HIT_TOKENS = "hfpaged.prefix.hit_tokens"
PREFIX_QUERIED_TOKENS = "hfpaged.prefix.queried_tokens"
PREFIX_MISS_REASON = "hfpaged.prefix.miss_reason"
PREFIX_WAITED_FOR = "hfpaged.prefix.waited_for"
PREEMPTIONS = "hfpaged.preemptions"
LOST_TOKENS = "hfpaged.lost_tokens"
TENANT = "hfpaged.tenant"
PRIORITY = "hfpaged.priority"
ADAPTER = "hfpaged.adapter"
NUM_BEAMS = "hfpaged.num_beams"
ROWS = "hfpaged.rows"
TOKENS = "hfpaged.tokens"
START_POSITION = "hfpaged.start_position"
STEP = "hfpaged.step"
FORWARDS = "hfpaged.forwards"
AGAIN = "hfpaged.again"
COMPUTED_TOKENS = "hfpaged.computed_tokens"
DRAFT_TOKENS = "hfpaged.draft_tokens"
ACCEPTED_TOKENS = "hfpaged.accepted_tokens"
LINK = "hfpaged.link"
WAIT = "hfpaged.wait."  # and the cause: blocks, seats, budget, prefix, turn

# Spans and their events.
QUEUE_SPAN = "queue"
PREFILL_SPAN = "prefill"
DECODE_SPAN = "decode"
FIRST_TOKEN_EVENT = "first_token"
PREEMPTED_EVENT = "preempted"

# Metrics.
REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"


def error_type(error: BaseException) -> str:
    """The value of `error.type`: the name of its class, with its module unless it is built in."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
