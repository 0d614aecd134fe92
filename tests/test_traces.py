"""Spans of the requests of batchers: their shape, their times, what they say, and that nothing is left of them."""

from __future__ import annotations

import gc
import threading

import pytest
import tiny_models
import tiny_tokenizers
from fake_clock import FakeClock
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from stub_batcher import StubBatcher
from test_batcher_tokens import alone, batcher_of, checked, prompts
from traced import events_of, link_targets, seconds, states, tracing, unpatched

import hfpaged
from hfpaged import ContinuousBatcher, PagedCache, telemetry
from hfpaged.engine import events as ev
from hfpaged.errors import CallbackError, InvalidConfigError, RequestTooLongError
from hfpaged.telemetry import _otel_traces

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 6, "do_sample": False}
# Short of blocks: requests are preempted.
SHORT = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 16}
ROOMY = {"num_blocks": 200, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}


@pytest.fixture
def traced():
    with tracing() as traced:
        yield traced
        assert sum(states()) == 0


@pytest.fixture
def batcher():
    batcher = batcher_of("llama", **ROOMY)
    yield batcher
    checked(batcher)


@pytest.fixture
def stub(monkeypatch):
    """Makes a batcher in a time that stands still but for its forwards, which take a second each."""

    def make(**sizes):
        batcher = StubBatcher(**ROOMY | sizes)
        clock = FakeClock(monkeypatch)
        clock.tick_in_forwards(batcher)
        return batcher, clock

    return make


def test_a_request_is_one_span_with_its_stays_below_it(traced, stub):
    batcher, clock = stub()
    batcher.add_request(prompts((40,))[0], request_id="long", **GREEDY)
    clock.time += 3
    while batcher.has_work:
        batcher.step()
    (span,) = traced.requests
    assert (span.name, span.kind, span.parent) == ("text_completion LlamaForCausalLM", SpanKind.INTERNAL, None)
    assert (span.start_time, seconds(span)) == (1000 * 10**9, 3 + 3 + 5)
    assert traced.shape(span) == [("queue", 3), ("prefill", 1), ("prefill", 1), ("prefill", 1), ("decode", 5)]
    chunks = [dict(chunk.attributes) for chunk in traced.children(span, "prefill")]
    assert chunks == [
        {"hfpaged.tokens": count, "hfpaged.start_position": start, "hfpaged.step": step}
        for step, (start, count) in enumerate([(0, 16), (16, 16), (32, 8)], 1)
    ]
    (decode,) = traced.children(span, "decode")
    assert decode.attributes == {"hfpaged.tokens": 6}
    (event,) = span.events
    assert (event.name, event.timestamp) == ("first_token", 1006 * 10**9)
    assert span.status.status_code is StatusCode.UNSET
    assert len(traced.spans) == 6  # none for a token


def test_one_token_that_is_left_of_a_prompt_is_decoded(traced, stub):
    batcher, _ = stub()
    batcher.generate(prompts((17,)), **GREEDY)
    (span,) = traced.requests
    assert traced.shape(span) == [("queue", 0), ("prefill", 1), ("decode", 6)]
    assert span.events[0].timestamp - span.start_time == 2 * 10**9


def test_stays_of_a_request_that_is_alone_are_all_of_its_time(traced, stub):
    batcher, _ = stub()
    for length in (1, 2, 16, 17, 31, 33, 48):
        batcher.generate([prompts((length,))[0]], **GREEDY)
    for span in traced.requests:
        assert sum(map(seconds, traced.children(span))) == seconds(span)


def test_what_no_stay_covers_is_neither_forward_nor_sampling(traced):
    batcher, steps = batcher_of("llama", **ROOMY), []
    batcher.hooks.append(lambda event: steps.append(event) if isinstance(event, ev.StepFinished) else None)
    batcher.generate(prompts((45,)), max_new_tokens=9, do_sample=False)
    (span,) = traced.requests
    covered = sum(child.end_time - child.start_time for child in traced.children(span))
    spare = sum(step.seconds - step.forward_seconds - step.sampling_seconds for step in steps)
    between = steps[-1].time - (steps[0].time - steps[0].seconds) - sum(step.seconds for step in steps)
    assert (span.end_time - span.start_time - covered) / 1e9 <= spare + between + 1e-4
    checked(batcher)


def test_a_preempted_request_shows_its_gaps(traced, stub):
    batcher, _ = stub(**SHORT)
    outputs = batcher.generate(prompts(), max_new_tokens=12, do_sample=False)
    preempted = [output for output in outputs if output.metrics.preemptions]
    assert preempted
    for output in outputs:
        span, count = traced.of(output.request_id), output.metrics.preemptions
        assert events_of(span).count("preempted") == span.attributes["hfpaged.preemptions"] == count
        queue, decode = (traced.children(span, name) for name in ("queue", "decode"))
        assert [stay.attributes["hfpaged.again"] for stay in queue] == [False] + [True] * count
        assert len(decode) <= 1 + count
    for output in preempted:
        span = traced.of(output.request_id)
        lost = [event.attributes["hfpaged.lost_tokens"] for event in span.events if event.name == "preempted"]
        assert all(count > 0 for count in lost)
        names = [name for name, _ in traced.shape(span)]
        again = names.index("queue", 1)
        assert names[again : again + 2] == ["queue", "prefill"]
        assert names[-1] == "decode"
    # A step in which a request of this batch has no part is one in which its next chunk found no room.
    assert all(sum(map(seconds, traced.children(span))) <= seconds(span) for span in traced.requests)


def test_waits_are_those_of_each_stay_and_of_the_request(traced, stub):
    batcher, _ = stub(**SHORT)
    outputs = batcher.generate(prompts(), max_new_tokens=12, do_sample=False)
    causes = set()
    for output in outputs:
        span = traced.of(output.request_id)
        total = {}
        for stay in traced.children(span, "queue"):
            waits = {name: wait for name, wait in stay.attributes.items() if name.startswith("hfpaged.wait.")}
            assert sum(waits.values()) == pytest.approx(seconds(stay), abs=1e-6)
            total = {name: total.get(name, 0.0) + waits.get(name, 0.0) for name in total | waits}
        found = {name: wait for name, wait in span.attributes.items() if name.startswith("hfpaged.wait.")}
        assert found == pytest.approx(total)
        causes |= {name.removeprefix("hfpaged.wait.") for name, wait in found.items() if wait > 0.5}
    assert causes >= {"blocks", "budget"}


def test_a_request_says_what_it_asked_for_and_what_it_took(traced):
    model, tokenizer = unpatched(), tiny_tokenizers.byte_level()
    batcher = ContinuousBatcher(model, tokenizer, prepack=False, **ROOMY)
    config = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11}
    (output,) = batcher.generate(prompts((9,)), **config, tenant="team", priority=2, frequency_penalty=0.5, stop=["@@"])
    (span,) = traced.requests
    found, metrics = dict(span.attributes), output.metrics
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "hfpaged",
        "gen_ai.request.model": "LlamaForCausalLM",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.frequency_penalty": 0.5,
        "gen_ai.response.id": "request-0",
        "gen_ai.response.model": "LlamaForCausalLM",
        "gen_ai.response.finish_reasons": (output.finish_reason,),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": len(output.token_ids),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "hfpaged.computed_tokens": metrics.computed_tokens,
        "hfpaged.kv.format": "auto",
        "hfpaged.kv.blocks_peak": metrics.peak_blocks,
        "hfpaged.kv.bytes_peak": metrics.peak_bytes,
        "hfpaged.kv.bytes_shared": 0,
        "hfpaged.kv.byte_seconds": metrics.byte_seconds,
        "hfpaged.preemptions": 0,
        "hfpaged.prefix.hit_tokens": 0,
        "hfpaged.prefix.queried_tokens": 9,
        "hfpaged.prefix.miss_reason": "never seen",
        "hfpaged.tenant": "team",
        "hfpaged.priority": 2,
        "gen_ai.latency.time_in_queue": metrics.queue_time,
        "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
        "gen_ai.response.time_to_first_chunk": metrics.time_to_first_token,
        "gen_ai.latency.e2e": metrics.finished_time - metrics.arrival_time,
        "gen_ai.latency.time_in_model_prefill": metrics.first_token_time - metrics.admitted_time,
        "gen_ai.latency.time_in_model_decode": metrics.finished_time - metrics.first_token_time,
        "gen_ai.latency.time_in_model_inference": metrics.finished_time - metrics.admitted_time,
    }
    assert {name: value for name, value in found.items() if not name.startswith("hfpaged.wait.")} == expected
    assert metrics.byte_seconds > 0
    checked(batcher)


def test_a_request_that_asks_for_nothing_has_no_attributes_of_settings(traced, batcher):
    batcher.generate(prompts((9,)), **GREEDY)
    (span,) = traced.requests
    asked = {name for name in span.attributes if name.startswith("gen_ai.request.")}
    assert asked == {"gen_ai.request.model", "gen_ai.request.max_tokens"}
    assert not {"hfpaged.tenant", "hfpaged.priority", "hfpaged.num_beams", "hfpaged.adapter"} & set(span.attributes)


def test_a_span_names_the_adapter_that_its_request_chose(traced, batcher):
    batcher.generate(prompts((9,)), adapter="__base__", **GREEDY)
    (span,) = traced.requests
    assert span.attributes["hfpaged.adapter"] == "__base__"


@pytest.mark.parametrize("captures", [False, True])
def test_no_text_of_a_client_is_in_a_span_unless_the_process_wants_it(monkeypatch, captures):
    if captures:
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    with tracing() as traced:
        batcher = ContinuousBatcher(
            tiny_models.make("llama", vocab_size=512), tiny_tokenizers.byte_level(), prepack=False, **ROOMY
        )
        batcher.generate("the quick brown fox", **GREEDY, stop=["lazy dog"])
        with pytest.raises(InvalidConfigError, match="quick"):
            batcher.add_request(["a quick fox"], **GREEDY)
    said = " ".join(span.to_json() for span in traced.spans)
    assert ("lazy dog" in said) == ("a quick fox" in said) == captures
    assert "the quick brown fox" not in said
    checked(batcher)


def test_a_span_of_the_caller_is_the_parent_whoever_makes_the_steps(traced, batcher):
    with traced.tracer.start_as_current_span("mine") as mine, telemetry.operation("chat"):
        batcher.add_request(prompts((9,))[0], **GREEDY)
    batcher.add_request(prompts((9,))[0], **GREEDY)
    while batcher.has_work:
        batcher.step()
    first, second = traced.requests
    assert first.parent.span_id == mine.get_span_context().span_id
    assert first.name == "chat LlamaForCausalLM"
    assert first.attributes["gen_ai.operation.name"] == "chat"
    assert second.parent is None
    assert second.name == "text_completion LlamaForCausalLM"
    with batcher.running(), traced.tracer.start_as_current_span("other") as other:
        list(batcher.stream(prompts((9,))[0], **GREEDY))
    assert traced.requests[-1].parent.span_id == other.get_span_context().span_id


def test_a_server_says_what_its_spans_are(traced, batcher):
    options = {"operation": "chat", "kind": SpanKind.SERVER, "attributes": {"server.address": "here"}}
    with telemetry.request_span_options(**options), telemetry.request_span_options(attributes={"server.port": 80}):
        batcher.generate(prompts((9,)), **GREEDY)
    (span,) = traced.requests
    assert (span.name, span.kind) == ("chat LlamaForCausalLM", SpanKind.SERVER)
    assert (span.attributes["server.address"], span.attributes["server.port"]) == ("here", 80)


def test_a_request_is_linked_to_those_that_computed_its_prefix(traced, batcher):
    shared, own = prompts((32, 8))
    batcher.generate(shared, request_id="first", **GREEDY)
    batcher.generate([shared + own], request_id="second", **GREEDY)
    batcher.generate([shared + own + own], request_id="third", **GREEDY)
    batcher.generate(prompts((20,), seed=9), request_id="stranger", **GREEDY)
    first, second, third, stranger = (traced.of(name) for name in ("first", "second", "third", "stranger"))
    assert link_targets(first) == link_targets(stranger) == []
    assert link_targets(second) == [first.context.span_id]
    assert link_targets(third) == [first.context.span_id, second.context.span_id]
    assert dict(third.links[0].attributes) == {"hfpaged.link": "prefix"}
    assert second.attributes["hfpaged.prefix.hit_tokens"] == 32
    assert second.attributes["gen_ai.usage.cache_read.input_tokens"] == 32
    assert second.attributes["hfpaged.kv.bytes_shared"] == 0  # the first one held them no more
    assert "hfpaged.prefix.miss_reason" in second.attributes


def test_links_go_between_generate_and_batchers_both_ways(traced):
    model = unpatched()
    (prompt,) = prompts((33,))
    batcher = batcher_of("llama", **ROOMY)
    cache = PagedCache(model, pool=batcher.pool)
    alone(model, prompt, past_key_values=cache)
    batcher.generate([prompt], **GREEDY)
    (other,) = prompts((33,), seed=5)
    batcher.generate([other], **GREEDY)
    cache = PagedCache(model, pool=batcher.pool)
    alone(model, other, past_key_values=cache)
    call, request, other_request, other_call = traced.requests
    assert link_targets(call) == link_targets(other_request) == []
    assert link_targets(request) == [call.context.span_id]
    assert link_targets(other_call) == [other_request.context.span_id]
    del cache
    gc.collect()
    checked(batcher)


def test_requests_that_wait_for_a_prefix_name_the_one_that_computes_it(traced, stub):
    batcher, _ = stub()
    shared = prompts((40,))[0]
    first, second = batcher.generate([shared, [*shared, 5, 6, 7]], **GREEDY)
    span = traced.of(second.request_id)
    assert span.attributes["hfpaged.prefix.waited_for"] == first.request_id
    assert span.attributes["hfpaged.wait.prefix"] > 0
    assert link_targets(span) == [traced.of(first.request_id).context.span_id]


STATES = {
    "on its way": (0, []),
    "while its prompt is computed": (1, ["queue", "prefill"]),
    "while it decodes": (4, ["queue", "prefill", "prefill", "prefill", "decode"]),
}


@pytest.mark.parametrize(("steps", "names"), STATES.values(), ids=STATES)
def test_an_aborted_request_ends_where_it_was(traced, stub, steps, names):
    batcher, _ = stub()
    name = batcher.add_request(prompts((40,))[0], **GREEDY)
    for _ in range(steps):
        batcher.step()
    batcher.abort(name)
    batcher.step()
    span = traced.of(name)
    assert [child for child, _ in traced.shape(span)] == (names or ["queue"])
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert span.status.status_code is StatusCode.UNSET
    assert "error.type" not in span.attributes


def test_one_that_is_aborted_in_the_queue_says_what_it_waited_for(traced, stub):
    batcher, _ = stub(max_num_seqs=1)
    batcher.add_request(prompts((9,))[0], **GREEDY)
    name = batcher.add_request(prompts((12,))[0], **GREEDY)
    batcher.step()
    batcher.step()
    batcher.abort(name)
    (queue,) = traced.children(traced.of(name))
    assert (queue.name, seconds(queue), queue.attributes["hfpaged.again"]) == ("queue", 2, False)
    assert queue.attributes["hfpaged.wait.seats"] == pytest.approx(2)
    batcher.close()


def test_one_that_is_aborted_after_a_preemption_is_in_the_queue_again(traced, stub):
    batcher, _ = stub(**SHORT)
    seen = []
    batcher.hooks.append(seen.append)
    for prompt in prompts():
        batcher.add_request(prompt, max_new_tokens=12, do_sample=False)
    while not any(isinstance(event, ev.Preempted) for event in seen):
        batcher.step()
    (name,) = {event.request_id for event in seen if isinstance(event, ev.Preempted)}
    batcher.abort(name)
    names = [child for child, _ in traced.shape(traced.of(name))]
    assert names[-2:] == ["decode", "queue"]
    queue = traced.children(traced.of(name))[-1]
    waits = {wait: count for wait, count in queue.attributes.items() if wait != "hfpaged.again"}
    assert queue.attributes["hfpaged.again"]
    assert sum(waits.values()) == pytest.approx(seconds(queue), abs=1e-6)
    batcher.close()


def test_a_forward_that_fails_is_an_error_of_its_requests(traced, stub):
    batcher, _ = stub()
    fault = ZeroDivisionError("broken layer")

    def fail():
        raise fault

    name = batcher.add_request(prompts((40,))[0], **GREEDY)
    batcher.step()
    batcher.before_forward = fail
    batcher.step()
    span = traced.of(name)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "broken layer")
    assert span.attributes["error.type"] == "ZeroDivisionError"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)
    (event,) = span.events
    assert event.name == "exception"
    assert event.attributes["exception.message"] == "broken layer"
    assert [child for child, _ in traced.shape(span)] == ["queue", "prefill"]


@pytest.mark.parametrize("captures", [False, True])
def test_an_error_of_ours_is_named_with_its_module_and_what_a_callback_said_is_content(
    traced, batcher, monkeypatch, captures
):
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", str(captures))

    def broken(ids, scores):
        if ids.shape[1] > 12:
            raise ValueError("the prompt was secret")
        return scores

    (output,) = batcher.generate(prompts((9,)), **GREEDY, logits_processor=[broken])
    assert isinstance(output.error, CallbackError)
    (span,) = traced.requests
    assert span.attributes["error.type"] == "hfpaged.errors.CallbackError"
    assert ("secret" in span.to_json()) is captures
    assert [child for child, _ in traced.shape(span)] == ["queue", "prefill", "decode"]


def test_a_request_that_is_refused_is_a_span_without_length(traced, batcher):
    with traced.tracer.start_as_current_span("mine") as mine, pytest.raises(RequestTooLongError):
        batcher.add_request([5] * 300, request_id="huge", **GREEDY)
    with pytest.raises(InvalidConfigError):
        batcher.add_request([5], no_such_setting=1)
    huge, other = traced.requests
    assert huge.parent.span_id == mine.get_span_context().span_id
    assert huge.attributes["gen_ai.response.id"] == "huge"
    assert huge.attributes["error.type"] == "hfpaged.errors.RequestTooLongError"
    assert other.attributes["error.type"] == "hfpaged.errors.InvalidConfigError"
    assert all(span.status.status_code is StatusCode.ERROR for span in (huge, other))
    assert (seconds(huge), traced.children(huge), sum(states())) == (0, [], 0)


def test_samples_of_a_prompt_are_one_request(traced, stub):
    batcher, _ = stub(**SHORT | {"num_blocks": 30})
    sampled = {"max_new_tokens": 12, "do_sample": True, "n": 3, "seed": 1}
    outputs = batcher.generate(prompts(), **sampled)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output in outputs:
        span = traced.of(output.request_id)
        assert span.attributes["gen_ai.request.choice.count"] == 3
        assert span.attributes["gen_ai.usage.output_tokens"] == 36
        (decode,) = traced.children(span, "decode")
        assert decode.end_time == span.end_time
        assert len(traced.children(span, "queue")) == 1 + output.metrics.preemptions


def test_beams_are_one_request(traced, stub):
    batcher, _ = stub(**SHORT | {"num_blocks": 22, "max_num_seqs": 9})
    outputs = batcher.generate(prompts((9, 17, 20)), max_new_tokens=16, num_beams=3, do_sample=False)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output in outputs:
        span = traced.of(output.request_id)
        assert span.attributes["hfpaged.num_beams"] == 3
        assert len(traced.children(span, "queue")) == 1 + output.metrics.preemptions
        decode = traced.children(span, "decode")
        assert decode[-1].end_time == span.end_time
        assert len(decode) == 1 + events_of(span).count("preempted")


def test_nothing_is_recorded_of_requests_that_are_sampled_out():
    with tracing(sampler=ALWAYS_OFF) as traced:
        batcher = batcher_of("llama", **ROOMY)
        name = batcher.add_request(prompts((9,))[0], **GREEDY)
        batcher.step()
        assert sum(states()) == 1
        flags = telemetry.trace_headers(batcher, name)["traceparent"].split("-")[3]
        assert int(flags, 16) & 1 == 0  # whom it calls must not record it either
        while batcher.has_work:
            batcher.step()
        assert sum(states()) == 0
    assert traced.spans == ()
    checked(batcher)


def test_without_an_sdk_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)  # whatever other tests have left there
    telemetry.instrument()
    try:
        batcher = batcher_of("llama", **ROOMY)
        name = batcher.add_request(prompts((9,))[0], **GREEDY)
        batcher.step()
        assert sum(states()) == 0
        assert telemetry.trace_headers(batcher, name) == {}
        while batcher.has_work:
            batcher.step()
        checked(batcher)
    finally:
        telemetry.uninstrument()


def test_batchers_with_requests_of_one_name_do_not_meet(traced):
    one, other = (batcher_of("llama", **ROOMY) for _ in range(2))
    for batcher, length in ((one, 9), (other, 17)):
        batcher.add_request(prompts((length,))[0], request_id="same", **GREEDY)
    while one.has_work or other.has_work:
        one.step()
        other.step()
    assert [span.attributes["gen_ai.usage.input_tokens"] for span in traced.requests] == [9, 17]
    checked(one)
    checked(other)


def test_requests_of_a_batcher_that_is_closed_end(traced):
    batcher = batcher_of("llama", **ROOMY)
    batcher.add_request(prompts((9,))[0], **GREEDY)
    batcher.add_request(prompts((40,))[0], **GREEDY)
    batcher.step()
    batcher.close()
    assert [span.attributes["gen_ai.response.finish_reasons"] for span in traced.requests] == [("abort",)] * 2
    hfpaged.unpatch(batcher.model)


def test_spans_of_requests_under_way_end_when_nobody_watches_any_more():
    with tracing() as traced:
        batcher = batcher_of("llama", **ROOMY)
        batcher.add_request(prompts((9,))[0], **GREEDY)
        batcher.step()
    assert [span.name for span in traced.requests] == ["text_completion LlamaForCausalLM"]
    while batcher.has_work:
        batcher.step()
    assert len(traced.requests) == 1
    checked(batcher)


class Broken(SpanProcessor):
    def on_start(self, span, parent_context=None):
        raise RuntimeError("no room for spans")

    on_end = on_start


@pytest.mark.parametrize("kind", [ev.Arrived, ev.Admitted, ev.Finished])
def test_the_event_under_way_when_nobody_watches_any_more_begins_no_span(kind):
    def stop(event):
        if isinstance(event, kind):
            telemetry.uninstrument()

    batcher = ContinuousBatcher(unpatched(), prepack=False, hooks=(stop,), **ROOMY)
    started = []

    class Starts(SpanProcessor):
        def on_start(self, span, parent_context=None):
            started.append(span)

    context = tracing()
    traced = context.__enter__()
    traced.provider.add_span_processor(Starts())
    batcher.generate(prompts((9,)), **GREEDY)
    assert all(span.end_time is not None for span in started)
    checked(batcher)


def test_a_span_processor_that_raises_changes_no_token(traced, caplog):
    traced.provider.add_span_processor(Broken())
    batcher = batcher_of("llama", **ROOMY)
    outputs = batcher.generate(prompts((9, 30)), **GREEDY)
    model = unpatched()
    assert [output.token_ids for output in outputs] == [
        alone(model, prompt, **GREEDY)[0] for prompt in prompts((9, 30))
    ]
    assert "a hook raised" in caplog.text
    batcher.close()


def test_nothing_is_left_of_a_thousand_requests(traced, monkeypatch):
    monkeypatch.setattr("hfpaged.prefix_index.REMEMBERED", 40)
    batcher = StubBatcher(num_blocks=60, block_size=4, max_num_seqs=16, max_num_batched_tokens=256)
    origins = _otel_traces._traces[batcher]._origins
    names = [batcher.add_request(prompt, **GREEDY) for prompt in prompts([8] * 1000)]
    for name in names[::7]:
        batcher.abort(name)
    while batcher.has_work:
        batcher.step()
    assert len(traced.requests) == 1000
    assert sum(states()) == 0
    gc.collect()
    assert 0 < len(origins) <= 60 + 40  # who computed blocks that are still known
    batcher.close()
    del batcher
    gc.collect()  # the batcher, whose end frees its pool
    gc.collect()
    assert len(origins) == 0


def test_steps_and_callers_in_many_threads_lose_no_span(traced):
    batcher = batcher_of("llama", **ROOMY)

    def ask(number):
        with traced.tracer.start_as_current_span(f"user {number}"):
            for prompt in prompts((5, 9), seed=number):
                list(batcher.stream(prompt, max_new_tokens=3, do_sample=False))

    with batcher.running():
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    users = {span.context.span_id: span.name for span in traced.spans if span.name.startswith("user")}
    assert sorted(users[span.parent.span_id] for span in traced.requests) == sorted([f"user {n}" for n in range(6)] * 2)
    checked(batcher)


def test_a_batcher_that_is_dropped_is_dropped_here_too(traced):
    gc.collect()
    before = len(_otel_traces._traces)
    batcher = batcher_of("llama", **ROOMY)
    batcher.generate(prompts((9,)), **GREEDY)
    assert len(_otel_traces._traces) == before + 1
    del batcher
    gc.collect()
    assert len(_otel_traces._traces) == before


@pytest.mark.parametrize("then", ["another batcher", "the end"])
def test_spans_of_a_batcher_that_is_dropped_with_requests_end(then):
    with tracing() as traced:
        batcher = batcher_of("llama", **ROOMY)
        batcher.add_request(prompts((9,))[0], request_id="left", **GREEDY)
        batcher.step()
        del batcher
        gc.collect()
        if then == "another batcher":
            checked(batcher_of("llama", **ROOMY))
            assert traced.of("left").end_time is not None
    assert traced.of("left").end_time is not None
