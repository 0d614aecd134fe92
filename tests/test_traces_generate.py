"""Spans of plain generate() with a PagedCache."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode
from test_batcher_tokens import alone, prompts
from traced import events_of, link_targets, tracing, unpatched
from transformers import LogitsProcessorList

import hfpaged
from hfpaged import PagedCache, telemetry

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
]


@pytest.fixture
def model():
    yield unpatched()
    unpatched()


@pytest.fixture
def traced():
    with tracing() as traced:
        yield traced


def run(model, length=9, **arguments):
    return alone(
        model, prompts((length,))[0], **{"max_new_tokens": 6, "past_key_values": PagedCache(model)} | arguments
    )


def test_a_call_is_a_span_with_prefill_and_decode_below_it(traced, model):
    expected = alone(model, prompts((9,))[0], max_new_tokens=6)
    assert run(model) == expected
    (span,) = traced.requests
    assert (span.name, span.parent) == ("text_completion LlamaForCausalLM", None)
    prefill, decode = traced.children(span)
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.attributes == {"hfpaged.tokens": 9}
    assert decode.attributes == {"hfpaged.forwards": 5, "hfpaged.tokens": 6}
    assert prefill.end_time == decode.start_time
    assert decode.end_time == span.end_time
    assert events_of(span) == ["first_token"]
    found = dict(span.attributes)
    measured = {"hfpaged.kv.byte_seconds", "gen_ai.latency.e2e", "gen_ai.latency.time_to_first_token"}
    assert all(found.pop(name) > 0 for name in measured)
    peak = found.pop("hfpaged.kv.bytes_peak")
    assert peak == found.pop("hfpaged.kv.blocks_peak") * 1536 * 4  # 16 tokens, two layers, K and V of 2 x 12 floats
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hfpaged",
        "gen_ai.request.model": "LlamaForCausalLM",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.response.model": "LlamaForCausalLM",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "hfpaged.rows": 1,
        "hfpaged.forwards": 6,
        "hfpaged.kv.format": "auto",
        "hfpaged.kv.bytes_shared": 0,
        "hfpaged.prefix.hit_tokens": 0,
        "hfpaged.prefix.queried_tokens": 9,
        "hfpaged.prefix.miss_reason": "below block size",
    }


def test_settings_of_sampling_are_told_where_it_samples(traced, model):
    torch.manual_seed(0)
    run(model, do_sample=True, temperature=0.5, top_k=7, num_return_sequences=2)
    run(model, num_beams=3)
    first, second = traced.requests
    assert first.attributes["gen_ai.request.temperature"] == 0.5
    assert first.attributes["gen_ai.request.top_k"] == 7
    assert first.attributes["gen_ai.request.choice.count"] == 2
    assert second.attributes["hfpaged.num_beams"] == 3
    assert "gen_ai.request.temperature" not in second.attributes


def test_the_span_is_the_current_one_while_generate_runs_and_the_users_own_its_parent(traced, model):
    inside = []

    def look(ids, scores):
        inside.append((trace.get_current_span().get_span_context().span_id, telemetry.trace_headers()))
        return scores

    with traced.tracer.start_as_current_span("mine") as mine, telemetry.operation("chat"):
        run(model, logits_processor=LogitsProcessorList([look]))
        assert trace.get_current_span() is mine
    (span,) = traced.requests
    assert span.name == "chat LlamaForCausalLM"
    assert span.parent.span_id == mine.get_span_context().span_id
    assert {name for name, _ in inside} == {span.context.span_id}
    assert inside[0][1]["traceparent"].startswith(f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-0")
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_call_that_raises_is_an_error_and_takes_its_span_out_of_the_context(traced, model):
    def broken(ids, scores):
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        run(model, logits_processor=LogitsProcessorList([broken]))
    assert trace.get_current_span() is trace.INVALID_SPAN
    (span,) = traced.requests
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no")
    assert span.attributes["error.type"] == "ZeroDivisionError"
    assert events_of(span) == ["first_token", "exception"]
    assert "gen_ai.usage.output_tokens" not in span.attributes


@pytest.mark.parametrize("settings", [{"max_new_tokens": "ten"}, {"num_beams": "two"}], ids=str)
def test_a_call_that_is_refused_for_its_settings_is_an_error_with_a_span(traced, caplog, model, settings):
    with pytest.raises((TypeError, ValueError)):
        run(model, **settings)
    (span,) = traced.requests
    assert span.status.status_code is StatusCode.ERROR
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert "a hook raised" not in caplog.text


def test_ctrl_c_takes_the_span_out_of_the_context_too(traced, model):
    def stop(ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, logits_processor=LogitsProcessorList([stop]))
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert traced.requests[0].attributes["error.type"] == "KeyboardInterrupt"


def test_a_call_inside_of_a_call_is_its_child(traced, model):
    def ask(ids, scores):
        if ids.shape[1] == 10:
            run(model, length=4, max_new_tokens=2)
        return scores

    assert run(model, logits_processor=LogitsProcessorList([ask])) == alone(model, prompts((9,))[0], max_new_tokens=6)
    outer, inner = traced.requests
    assert inner.parent.span_id == outer.context.span_id
    assert outer.attributes["gen_ai.usage.output_tokens"] == 6
    assert inner.attributes["gen_ai.usage.output_tokens"] == 2
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_assisted_generation_keeps_its_context(traced, model):
    assistant = tiny_models.make("llama", num_hidden_layers=1)
    expected = alone(model, prompts((9,))[0], max_new_tokens=12)
    assert run(model, max_new_tokens=12, assistant_model=assistant) == expected
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert traced.requests[0].attributes["gen_ai.usage.output_tokens"] == 12


def test_a_call_is_linked_to_the_one_that_computed_its_prefix(traced, model):
    cache = PagedCache(model)
    run(model, length=40, past_key_values=cache)
    again = PagedCache(model, pool=cache.pool)
    run(model, length=40, past_key_values=again)
    first, second = traced.requests
    assert link_targets(first) == []
    assert link_targets(second) == [first.context.span_id]
    assert second.attributes["hfpaged.prefix.hit_tokens"] == 32
    assert second.attributes["gen_ai.usage.cache_read.input_tokens"] == 32
    assert second.attributes["hfpaged.kv.bytes_shared"] > 0
    assert traced.children(second, "prefill")[0].attributes["hfpaged.tokens"] == 8


def test_what_a_cache_has_from_earlier_calls_is_read_from_it(traced, model):
    cache = PagedCache(model)
    ids = torch.tensor(prompts((20,)))
    out = model.generate(ids, max_new_tokens=4, do_sample=False, past_key_values=cache)
    model.generate(out, max_new_tokens=4, do_sample=False, past_key_values=cache)
    second = traced.requests[1]
    assert second.attributes["gen_ai.usage.input_tokens"] == 24
    assert second.attributes["gen_ai.usage.cache_read.input_tokens"] == 23
    assert traced.children(second, "prefill")[0].attributes["hfpaged.tokens"] == 1


def test_a_call_without_a_paged_cache_has_no_span(traced, model):
    alone(model, prompts((9,))[0])
    assert traced.spans == ()


def test_a_sampled_out_call_passes_that_on():
    def look(ids, scores):
        seen.append(telemetry.trace_headers()["traceparent"])
        return scores

    seen = []
    with tracing(sampler=ALWAYS_OFF) as traced:
        run(unpatched(), logits_processor=LogitsProcessorList([look]))
    assert traced.spans == ()
    assert {int(header.split("-")[3], 16) & 1 for header in seen} == {0}
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_without_an_sdk_a_call_has_no_context(monkeypatch):
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)  # whatever other tests have left there

    def look(ids, scores):
        seen.append(trace.get_current_span())
        return scores

    seen = []
    telemetry.instrument()
    try:
        run(unpatched(), logits_processor=LogitsProcessorList([look]))
    finally:
        telemetry.uninstrument()
    assert all(span is trace.INVALID_SPAN for span in seen)


def test_uninstrument_while_a_call_begins_leaves_its_context_as_it_was(model):
    started = []

    class Stops(SpanProcessor):
        def on_start(self, span, parent_context=None):
            started.append(span)
            telemetry.uninstrument()  # as another thread might

    context = tracing()
    context.__enter__().provider.add_span_processor(Stops())
    run(model)
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert [span.end_time is None for span in started] == [False]
    assert not hfpaged.generation_events.is_watched()


def test_uninstrument_inside_of_a_call_leaves_its_context_as_it_was(model):
    def stop(ids, scores):
        if ids.shape[1] == 10:
            telemetry.uninstrument()
        return scores

    generate, context = type(model).generate, tracing()
    traced = context.__enter__()
    assert type(model).generate is not generate
    run(model, logits_processor=LogitsProcessorList([stop]))
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert [span.name for span in traced.requests] == ["text_completion LlamaForCausalLM"]
    run(model)
    assert len(traced.requests) == 1
    assert type(model).generate is generate
    assert hfpaged.generation_events.is_watched() is False
