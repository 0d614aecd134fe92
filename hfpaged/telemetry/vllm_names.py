"""The same numbers under the names of vLLM's metrics, so that dashboards, routers and scalers that know these go on.

Names and labels as in vLLM 0.32, with those that it has dropped and older dashboards read; buckets are ours, which
PromQL does not mind. What we have no number for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from hfpaged.engine import tally_keys as keys
from hfpaged.engine.sums import Key, Sums
from hfpaged.telemetry import batcher_readings as live
from hfpaged.telemetry.family_making import histogram_family, number_family
from hfpaged.telemetry.readings import Readings

LABELS = ("model_name", "engine")
ENGINE = "0"


Named = tuple[str, Sums]  # a model's name and its figures


class Single(NamedTuple):
    """A metric of theirs that is one number of ours."""

    name: str
    key: Key
    help: str


GAUGES = (
    Single("num_requests_running", live.RUNNING, "Requests that hold blocks."),
    Single("num_requests_waiting", live.WAITING, "Requests that hold no blocks."),
    Single("kv_cache_usage_perc", ("hfpaged_kv_usage_ratio",), "Used blocks as a part of all, 0 to 1."),
    Single("gpu_cache_usage_perc", ("hfpaged_kv_usage_ratio",), "An older name of kv_cache_usage_perc."),
)
COUNTERS = (
    Single("prefix_cache_queries", ("hfpaged_prefix_queried_tokens_total",), "Prompt tokens that were looked up."),
    Single("prefix_cache_hits", ("hfpaged_prefix_hit_tokens_total",), "Prompt tokens that were found."),
    Single("gpu_prefix_cache_queries", ("hfpaged_prefix_queried_tokens_total",), "An older name."),
    Single("gpu_prefix_cache_hits", ("hfpaged_prefix_hit_tokens_total",), "An older name."),
    Single("num_preemptions", keys.PREEMPTIONS, "Preemptions."),
    Single("prompt_tokens", keys.PROMPT_TOKENS, "Prompt tokens of admitted requests."),
    Single("prompt_tokens_cached", keys.CACHED_TOKENS, "Prompt tokens of requests that were found."),
    Single("generation_tokens", keys.GENERATED_TOKENS, "Tokens that were sampled."),
)
HISTOGRAMS = (
    Single("time_to_first_token_seconds", keys.FIRST_TOKEN, "From arrival to the first token."),
    Single("inter_token_latency_seconds", keys.INTER_TOKEN, "Between two tokens of a request."),
    Single("time_per_output_token_seconds", keys.INTER_TOKEN, "An older name of inter_token_latency_seconds."),
    Single("request_time_per_output_token_seconds", keys.PER_TOKEN, "Mean time of each token behind the first."),
    Single("e2e_request_latency_seconds", keys.DURATION, "From arrival to the end."),
    Single("request_queue_time_seconds", keys.QUEUE, "From arrival to the first admission."),
    Single("request_prefill_time_seconds", keys.PREFILL_TIME, "From the first admission to the first token."),
    Single("request_decode_time_seconds", keys.DECODE_TIME, "From the first token to the end."),
    Single("request_inference_time_seconds", keys.RUN_TIME, "From the first admission to the end."),
    Single("request_prompt_tokens", keys.PROMPT_LENGTH, "Prompt tokens of ended requests."),
    Single("request_generation_tokens", keys.OUTPUT_LENGTH, "New tokens of ended requests."),
    Single("iteration_tokens_total", keys.ALL_STEP_TOKENS, "Tokens of a step."),
)


def vllm_families(readings: Readings) -> list[Family]:
    """Of all models."""
    models = [(model, sums) for model, sums in readings.models.items() if keys.RECEIVED in sums.numbers]
    return [
        *_singles(GaugeMetricFamily, GAUGES, models),
        *_singles(CounterMetricFamily, COUNTERS, models),
        *(_histogram(single, models) for single in HISTOGRAMS),
        _labelled(GaugeMetricFamily, "num_requests_waiting_by_reason", "reason", "Waiting requests.", models, _waiting),
        _labelled(CounterMetricFamily, "request_success", "finished_reason", "Ended requests.", models, _ended),
        _labelled(CounterMetricFamily, "prompt_tokens_by_source", "source", "Prompt tokens.", models, _sources),
        _config(models),
    ]


def _singles(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], singles: tuple[Single, ...], models: list[Named]
) -> Iterator[Family]:
    for name, key, text in singles:
        numbers = [((model, ENGINE), sums.numbers[key]) for model, sums in models if key in sums.numbers]
        yield number_family(kind, f"vllm:{name}", text, LABELS, numbers)


def _histogram(single: Single, models: list[Named]) -> Family:
    found = [((model, ENGINE), sums.histograms[single.key]) for model, sums in models]
    return histogram_family(f"vllm:{single.name}", single.help, LABELS, found)


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, label: str, text: str, models: list[Named],
    values: Callable[[Sums], dict[str, float]],
) -> Family:  # fmt: skip
    numbers = [((model, ENGINE, value), number) for model, sums in models for value, number in values(sums).items()]
    return number_family(kind, f"vllm:{name}", text, (*LABELS, label), numbers)


def _waiting(sums: Sums) -> dict[str, float]:
    """Deferred are those that wait for a prefix which another request computes."""
    deferred = min(sums.numbers[live.DEFERRED], sums.numbers[live.WAITING])
    return {"capacity": sums.numbers[live.WAITING] - deferred, "deferred": deferred}


def _ended(sums: Sums) -> dict[str, float]:
    finished = {key[1]: number for key, number in sums.numbers.items() if key[0] == keys.FINISHED}
    return finished | {"abort": sums.numbers[keys.ABORTED]}


def _sources(sums: Sums) -> dict[str, float]:
    cached = sums.numbers[keys.CACHED_TOKENS]
    return {
        "local_compute": max(sums.numbers[keys.PROMPT_TOKENS] - cached, 0), "local_cache_hit": cached,
        "external_kv_transfer": 0,
    }  # fmt: skip


def _config(models: list[Named]) -> Family:
    labels = (*LABELS, "cache_dtype", "block_size", "num_gpu_blocks")
    infos = [(model, key[1:4]) for model, sums in models for key in sums.numbers if key[0] == "hfpaged_kv_pool_info"]
    numbers = [((model, ENGINE, *info), 1) for model, info in infos]
    return number_family(GaugeMetricFamily, "vllm:cache_config_info", "Sizes of the pool.", labels, numbers)
