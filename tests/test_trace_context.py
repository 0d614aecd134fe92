"""W3C trace context in and out."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from test_batcher_tokens import batcher_of, checked, prompts
from traced import tracing

from hfpaged import telemetry

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 3, "do_sample": False}
# The example of the recommendation, https://www.w3.org/TR/trace-context/
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
EXAMPLE = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def traced():
    with tracing() as traced:
        yield traced


@pytest.fixture
def batcher(traced):
    batcher = batcher_of("llama", block_size=4)
    yield batcher
    checked(batcher)


def request_under(batcher, headers):
    with telemetry.remote_parent(headers):
        batcher.add_request(prompts((5,))[0], **GREEDY)
    while batcher.has_work:
        batcher.step()


GOOD = {
    "a mapping": {"traceparent": EXAMPLE},
    "in capitals": {"TraceParent": EXAMPLE},
    "pairs": [("accept", "*/*"), ("traceparent", EXAMPLE)],
    "bytes, as ASGI has them": [(b"traceparent", EXAMPLE.encode())],
    "a later version": {"traceparent": f"cc-{TRACE}-{PARENT}-01-what-will-be"},
}


@pytest.mark.parametrize("headers", GOOD.values(), ids=GOOD)
def test_a_request_joins_the_trace_of_its_headers(traced, batcher, headers):
    request_under(batcher, headers)
    (span,) = traced.requests
    assert span.context.trace_id == int(TRACE, 16)
    assert span.parent.span_id == int(PARENT, 16)
    assert span.parent.is_remote


BAD = {
    "no headers": {},
    "not of this form": {"traceparent": "nonsense"},
    "too short": {"traceparent": EXAMPLE[:-1]},
    "too long for its version": {"traceparent": EXAMPLE + "-more"},
    "a forbidden version": {"traceparent": "ff" + EXAMPLE[2:]},
    "capital digits": {"traceparent": EXAMPLE.upper()},
    "no trace": {"traceparent": f"00-{'0' * 32}-{PARENT}-01"},
    "no parent": {"traceparent": f"00-{TRACE}-{'0' * 16}-01"},
    "two of them": [("traceparent", EXAMPLE), ("Traceparent", EXAMPLE.replace("4bf9", "aaaa"))],
    "not ascii": [(b"traceparent", b"\xff\xfe" + EXAMPLE.encode())],
    "only a state": {"tracestate": "a=1"},
}


@pytest.mark.parametrize("headers", BAD.values(), ids=BAD)
def test_malformed_headers_change_nothing(traced, batcher, headers):
    request_under(batcher, headers)
    with traced.tracer.start_as_current_span("mine") as mine:
        request_under(batcher, headers)
    first, second = traced.requests
    assert first.parent is None
    assert second.parent.span_id == mine.get_span_context().span_id


def test_the_context_of_the_caller_is_as_it_was_behind_it():
    with telemetry.remote_parent({"traceparent": EXAMPLE}):
        assert telemetry.trace_headers() == {"traceparent": EXAMPLE}
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert telemetry.trace_headers() == {}


def test_a_request_that_its_sender_does_not_record_is_not_recorded(traced, batcher):
    request_under(batcher, {"traceparent": EXAMPLE[:-2] + "00"})
    assert traced.spans == ()


def test_what_a_request_calls_joins_its_trace_with_the_state_of_vendors(traced, batcher):
    state = [("tracestate", "rojo=00f067aa0ba902b7"), ("tracestate", "congo=t61rcWkgMzE")]
    with telemetry.remote_parent([("traceparent", EXAMPLE), *state]):
        name = batcher.add_request(prompts((5,))[0], **GREEDY)
    assert telemetry.trace_headers(batcher, name) == {}  # its span begins with the next step
    batcher.step()
    headers = telemetry.trace_headers(batcher, name)
    while batcher.has_work:
        batcher.step()
    (span,) = traced.requests
    assert headers == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01",
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
    }
    assert telemetry.trace_headers(batcher, name) == {}
    assert telemetry.trace_headers(batcher, "nobody") == {}
