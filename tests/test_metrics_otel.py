"""What a reader of OpenTelemetry's SDK collects."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import tiny_models
import torch
from metrics_figures import Figures
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from transformers import StoppingCriteria, StoppingCriteriaList

import hfpaged
from hfpaged import ContinuousBatcher, PagedCache, generation_events, kv_events
from hfpaged.engine import buckets, registry
from hfpaged.telemetry import _otel_metrics, _prometheus, observables
from hfpaged.telemetry.catalog import METRICS
from hfpaged.telemetry.span_options import operation

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 6, "do_sample": False}
DURATION, FIRST_TOKEN, PER_TOKEN = (
    f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")
)


@pytest.fixture
def model(request):
    """Named after the test, so that no other one counts for it."""
    model = tiny_models.make("llama")
    model.config._name_or_path = request.node.name
    yield model
    hfpaged.unpatch(model)


class Reading:
    """A provider with a reader."""

    def __init__(self):
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def metrics(self):
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        assert {scope.scope.name for scope in scopes} <= {"hfpaged"}
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name):
        metric = self.metrics().get(name)
        return [] if metric is None else list(metric.data.data_points)


@pytest.fixture
def reading():
    reading = Reading()
    undo = _otel_metrics.install(reading.provider)
    yield reading
    undo()
    reading.provider.shutdown()


def batcher_of(model, **sizes):
    return ContinuousBatcher(model, prepack=False, **{"num_blocks": 100, "block_size": 4} | sizes)


def prompts(count, length=9):
    return torch.randint(3, tiny_models.VOCAB, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


class Raising(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise ValueError("broken")


def attributes(model, **more):
    name = model.config._name_or_path
    return {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "hfpaged", "gen_ai.request.model": name,
        "gen_ai.response.model": name,
    } | more  # fmt: skip


def test_requests_are_in_the_histograms_of_the_conventions_with_their_buckets(reading, model):
    outputs = batcher_of(model).generate(prompts(3), **GREEDY)
    metrics = reading.metrics()
    bounds = {DURATION: buckets.DURATION, FIRST_TOKEN: buckets.FIRST_TOKEN, PER_TOKEN: buckets.PER_TOKEN}
    for name, expected in bounds.items():
        (point,) = metrics[name].data.data_points
        assert metrics[name].unit == "s"
        assert point.explicit_bounds == expected
        assert point.count == 3
        assert dict(point.attributes) == attributes(model)
    times = [output.metrics for output in outputs]
    sums = {name: metrics[name].data.data_points[0].sum for name in bounds}
    assert sums[DURATION] == pytest.approx(sum(t.finished_time - t.arrival_time for t in times))
    assert sums[FIRST_TOKEN] == pytest.approx(sum(t.first_token_time - t.arrival_time for t in times))
    assert sums[PER_TOKEN] == pytest.approx(sum((t.finished_time - t.first_token_time) / 5 for t in times))


def test_of_failed_requests_only_the_duration_is_told_with_the_type_of_the_error(reading, model):
    batcher = batcher_of(model)
    batcher.generate([prompts(1)[0]], stopping_criteria=StoppingCriteriaList([Raising()]), **GREEDY)
    (point,) = reading.points(DURATION)
    assert dict(point.attributes) == attributes(model, **{"error.type": "hfpaged.errors.CallbackError"})
    assert reading.points(FIRST_TOKEN) == reading.points(PER_TOKEN) == []


def test_aborted_requests_are_told_and_have_met_no_error(reading, model):
    batcher = batcher_of(model)
    name = batcher.add_request(prompts(1)[0], **GREEDY)
    batcher.step()
    batcher.abort(name)
    batcher.abort(batcher.add_request(prompts(1)[0], **GREEDY))  # one without a token
    assert [(point.count, dict(point.attributes)) for point in reading.points(DURATION)] == [(2, attributes(model))]
    assert [point.count for point in reading.points(FIRST_TOKEN)] == [1]
    assert reading.points(PER_TOKEN) == []


def test_the_operation_is_what_the_caller_says(reading, model):
    batcher = batcher_of(model)
    with operation("chat"):
        batcher.add_request(prompts(1)[0], **GREEDY)
    batcher.generate(prompts(2), **GREEDY)
    with operation("chat"):
        inputs = tiny_models.prompts([5])
        model.generate(**inputs, past_key_values=PagedCache(model, num_blocks=9), **GREEDY)
    counts = {point.attributes["gen_ai.operation.name"]: point.count for point in reading.points(DURATION)}
    assert counts == {"chat": 2, "text_completion": 2}
    hooks = [hook for hook in batcher.hooks if hook is not batcher.tally]
    assert [hook._operations for hook in hooks] == [{}]  # nothing is kept of those who are gone


def test_calls_of_generate_are_told_and_failed_ones_with_their_error(reading, model):
    cache = PagedCache(model, num_blocks=50)
    inputs = tiny_models.prompts([5, 7])
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    cache.reset()
    with pytest.raises(ValueError, match="broken"):
        model.generate(
            **inputs, past_key_values=cache, stopping_criteria=StoppingCriteriaList([Raising()]), **GREEDY
        )  # fmt: skip
    points = {point.attributes.get("error.type"): point for point in reading.points(DURATION)}
    assert {error: point.count for error, point in points.items()} == {None: 1, "ValueError": 1}
    assert dict(points[None].attributes) == attributes(model)
    for name in (FIRST_TOKEN, PER_TOKEN):
        (point,) = reading.points(name)
        assert point.count == 1
        assert "error.type" not in point.attributes


def test_gauges_and_counters_of_the_catalog_are_observed_as_a_scrape_has_them(reading, model, tmp_path):
    batcher = batcher_of(model, swap_space="1MiB", prefix_store=tmp_path)
    with kv_events.publish(batcher, "tcp://127.0.0.1:*"):
        batcher.generate(prompts(3), **GREEDY)
    batcher.add_request(prompts(1, 15)[0], **GREEDY)
    batcher.step()
    model.generate(**tiny_models.prompts([5]), past_key_values=PagedCache(model, num_blocks=9), **GREEDY)
    name = model.config._name_or_path
    figures, metrics = Figures(_prometheus.families(), name), reading.metrics()
    compared = set()
    for metric in METRICS:
        if metric.kind == "histogram" or metric.name.startswith(("hfpaged_dense_fallbacks", "hfpaged_shadow")):
            continue
        observed = metrics[observables.dotted(metric.name)]
        values = {
            frozenset(point.attributes.items()): point.value
            for point in observed.data.data_points
            if point.attributes["model_name"] == name
        }
        expected = {labels: n for (sample, labels), n in figures.samples.items() if sample == metric.name}
        assert values.keys() == expected.keys(), metric.name
        if metric.name not in ("hfpaged_device_memory_bytes", "hfpaged_stalled_seconds"):  # they go on
            assert values == expected, metric.name
        assert getattr(observed.data, "is_monotonic", False) == (metric.kind == "counter")
        assert observed.description == metric.help
        compared.add(observed.name)
    shadow = {name for name in metrics if name.startswith("hfpaged.shadow_")}
    assert compared == metrics.keys() - shadow - {
        DURATION,
        FIRST_TOKEN,
        PER_TOKEN,
        "hfpaged.dense_fallbacks",
    }  # other tests count it


@pytest.mark.parametrize(
    ("name", "dotted", "unit"),
    [
        ("hfpaged_kv_usage_ratio", "hfpaged.kv.usage_ratio", "1"),
        ("hfpaged_requests_received_total", "hfpaged.requests.received", ""),
        ("hfpaged_preemptions_total", "hfpaged.preemptions", ""),
        ("hfpaged_wait_seconds_total", "hfpaged.wait_seconds", "s"),
        ("hfpaged_kv_byte_seconds_total", "hfpaged.kv.byte_seconds", ""),
        ("hfpaged_device_memory_bytes", "hfpaged.device.memory_bytes", "By"),
        ("hfpaged_last_step_timestamp_seconds", "hfpaged.last_step_timestamp_seconds", "s"),
    ],
)
def test_names_have_dots_and_units_are_those_of_ucum(name, dotted, unit):
    assert observables.dotted(name) == dotted
    assert observables.unit_of(name) == unit


def test_dotted_names_are_the_catalogs_when_they_are_translated_back():
    for metric in METRICS:
        back = observables.dotted(metric.name).replace(".", "_") + ("_total" if metric.kind == "counter" else "")
        assert back == metric.name


def test_one_collection_reads_once_and_the_next_one_anew(reading, model):
    batcher = batcher_of(model)
    with mock.patch.object(observables, "read_all", wraps=observables.read_all) as read:
        reading.metrics()
        assert read.call_count == 1
        batcher.generate(prompts(1), **GREEDY)
        received = reading.metrics()["hfpaged.requests.received"].data.data_points
        assert read.call_count == 2
    mine = [point.value for point in received if point.attributes["model_name"] == model.config._name_or_path]
    assert mine == [1]


def test_a_provider_that_does_nothing_costs_nothing(model):
    batcher = batcher_of(model)
    hooks, makers = list(batcher.hooks), dict(registry._makers)
    undo = _otel_metrics.install(NoOpMeterProvider())
    assert batcher.hooks == hooks
    assert registry._makers == makers
    assert not generation_events.is_watched()
    undo()


def test_an_sdk_that_is_switched_off_costs_nothing_either(model, monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    batcher, provider = batcher_of(model), MeterProvider()
    undo = _otel_metrics.install(provider)
    assert batcher.hooks == [batcher.tally]
    undo()


def test_without_a_provider_the_global_one_is_taken(model):
    reading = Reading()
    with mock.patch.object(_otel_metrics, "get_meter_provider", return_value=reading.provider):
        undo = _otel_metrics.install()
    batcher_of(model).generate(prompts(1), **GREEDY)
    assert [point.count for point in reading.points(DURATION)] == [1]
    undo()


def test_undoing_leaves_nothing_behind_and_it_can_be_done_again(model, caplog):
    reading, batcher = Reading(), batcher_of(model)
    for number in (1, 2):
        undo = _otel_metrics.install(reading.provider)
        batcher.generate(prompts(1), **GREEDY)
        assert [point.count for point in reading.points(DURATION)] == [number]
        assert "hfpaged.requests.received" in reading.metrics()
        undo()
        assert batcher.hooks == [batcher.tally]
        assert not generation_events.is_watched()
        batcher.generate(prompts(1), **GREEDY)
        model.generate(**tiny_models.prompts([5]), past_key_values=PagedCache(model, num_blocks=9), **GREEDY)
        assert [point.count for point in reading.points(DURATION)] == [number]
        assert not any(name.startswith("hfpaged.") for name in reading.metrics())
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and "opentelemetry" in record.name
    ]


def test_batchers_that_come_later_are_told_of_too(reading, model):
    first = batcher_of(model)
    second = ContinuousBatcher(model, pool=first.pool, prepack=False)
    first.generate(prompts(1), **GREEDY)
    second.generate(prompts(2), **GREEDY)
    assert [point.count for point in reading.points(DURATION)] == [3]
