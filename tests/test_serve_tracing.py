"""What is counted and traced of requests that come by HTTP."""

from __future__ import annotations

import pytest
import raw_http
from opentelemetry import trace
from prometheus_client.parser import text_string_to_metric_families
from served import served, wait_until
from serving import PATH, PROMPT, Counts, body, slow_steps, tiny_batcher
from traced import tracing

from hfpaged.serve import ServeOptions
from hfpaged.telemetry import metrics_text

pytestmark = pytest.mark.usefixtures("one_thread")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def batcher():
    with tiny_batcher(max_num_queued_requests=1, max_num_seqs=2) as batcher:
        yield batcher


def test_spans_are_a_servers_and_of_the_callers_trace(batcher):
    with tracing() as traced, served(batcher) as server:
        assert server.client.post(PATH, json=body(max_tokens=3), headers=TRACED).status_code == 200
        assert server.client.post(PATH, json=body(max_tokens=3, stream=True)).status_code == 200
        server.wait_until_idle()
        first, second = traced.requests
    assert first.context.trace_id == int(TRACE, 16)
    assert first.parent.span_id == int(PARENT, 16)
    assert second.parent is None
    for span in (first, second):
        assert span.kind.name == "SERVER"
        assert span.name.startswith("text_completion ")
        assert (span.attributes["server.address"], span.attributes["server.port"]) == ("127.0.0.1", server.port)
        assert "error.type" not in span.attributes
        assert not [value for value in span.attributes.values() if str(PROMPT[0]) == value]


def test_what_the_engine_refuses_has_a_span_that_says_why(batcher):
    with tracing() as traced, served(batcher) as server:
        assert server.client.post(PATH, json=body([7] * 250, 200), headers=TRACED).status_code == 400
        (span,) = traced.requests
    assert span.attributes["error.type"] == "hfpaged.errors.RequestTooLongError"
    assert span.kind.name == "SERVER"
    assert span.context.trace_id == int(TRACE, 16)


def test_no_other_spans_stand_between(batcher, monkeypatch):
    """FastAPI has some of its own as soon as the process has a provider."""
    with tracing() as traced:
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: traced.provider)
        with served(batcher) as server:
            server.client.post(PATH, json=body(max_tokens=2), headers=TRACED)
            server.client.get("/ready")
            server.wait_until_idle()
        (request,) = traced.requests
        assert {span.name for span in traced.spans} == {request.name, "queue", "prefill", "decode"}
        assert request.parent.span_id == int(PARENT, 16)


def test_one_connection_after_another_keeps_traces_apart(batcher):
    """The context of a request does not stay with the thread or the task that served it."""
    with tracing() as traced, served(batcher) as server:
        server.client.post(PATH, json=body(max_tokens=2), headers=TRACED)
        server.client.post(PATH, json=body(max_tokens=2))
        server.wait_until_idle()
        first, second = traced.requests
    assert first.context.trace_id != second.context.trace_id


def scraped(server, **headers):
    answer = server.client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    return answer


def samples(text):
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(found, name):
    return sum(value for (metric, _), value in found.items() if metric == name)


def test_metrics_are_those_of_the_batcher_and_of_the_process(batcher):
    with served(batcher) as server:
        server.client.post(PATH, json=body(max_tokens=3))
        answer = scraped(server)
    found = samples(answer.text)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    received = "hfpaged_requests_received_total"  # of all batchers of the process
    assert total(found, received) == total(samples(metrics_text()), received) > 0
    assert total(found, "process_resident_memory_bytes") > 0
    assert not any(name.startswith("vllm:") for name, _ in found)


def test_metrics_come_as_who_asks_prefers(batcher):
    with served(batcher) as server:
        answer = scraped(server, accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_metrics_have_the_names_of_vllm_besides(batcher):
    with served(batcher, ServeOptions(metrics_compat="vllm")) as server:
        found = samples(scraped(server).text)
    assert total(found, "vllm:num_requests_running") == 0
    assert "hfpaged_requests_received_total" in {name for name, _ in found}


def test_all_kinds_of_requests_are_counted_once(batcher):
    """received = finished + aborted + rejected + in flight, and what never reached the engine is none of them."""
    counts = Counts(batcher)
    with served(batcher) as server:
        post = server.client.post
        assert post(PATH, json=body(max_tokens=3)).status_code == 200
        assert post(PATH, json=body([PROMPT, PROMPT[:5]], 3, stream=True)).status_code == 200
        assert post(PATH, json=body([7] * 250, 200)).status_code == 400
        assert post(PATH, json={"prompt": PROMPT, "temperature": "hot"}).status_code == 400
        assert post(PATH, content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
        assert server.client.get("/nothing").status_code == 404
        with slow_steps(batcher), raw_http.connected(server.port) as one, raw_http.connected(server.port) as other:
            one.sendall(raw_http.request(PATH, body([PROMPT, PROMPT], stream=True)))
            other.sendall(raw_http.request(PATH, body()))
            wait_until(lambda: counts.in_flight == 3)
            assert post(PATH, json=body()).status_code == 429
        server.wait_until_idle()
        assert (counts.received, counts.finished, counts.aborted, counts.rejected) == (8, 3, 3, 2)
        counts.check()
        found = samples(metrics_text(batcher))
        reasons = {dict(labels)["reason"]: value for (name, labels), value in found.items()
                   if name == "hfpaged_requests_rejected_total"}  # fmt: skip
        assert (reasons["queue_full"], reasons["too_long"]) == (1, 1)
