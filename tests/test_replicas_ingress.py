"""The ingress without Ray: what it answers is what one process answers, and what is about replicas is gathered."""

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
import serve_models
from replica_answers import normal
from replicas_here import Hashing, Replicas
from traced import tracing

from hfpaged.replicas.ingress import Door, ingress_app
from hfpaged.serve import ServeOptions, build_app
from hfpaged.serve.app import paths
from hfpaged.serve.service import Service

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = {"api_keys": {"a": "key-a", "b": "key-b"}, "salt_secret": b"one secret of all"}
BODY_BYTES = 4000


@pytest.fixture(autouse=True)
def warm_at_once(monkeypatch):
    """The first forwards are others' to test."""

    async def warm_up(service):
        service.is_warm = True

    monkeypatch.setattr(Service, "_warm_up", warm_up)


@asynccontextmanager
async def both(*, replicas=2, **options):
    """Clients of one process, and of an ingress with so many replicas, and the latter's calls."""
    told = ServeOptions(**options)
    async with AsyncExitStack() as stack:
        apps = [build_app(serve_models.batcher(max_num_queued_requests=0, max_num_seqs=1), told)
                for _ in range(replicas + 1)]  # fmt: skip
        for app in apps:
            await stack.enter_async_context(app.router.lifespan_context(app))
            stack.callback(app.state.service.batcher.close)
        calls = Replicas(apps[1:])
        door = Door(told, apps[0].state.service.max_body_bytes)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x")
            )
            for app in (apps[0], ingress_app(calls, door, Hashing(), paths()))
        ]
        yield *clients, calls


def run(test, **options):
    async def go():
        async with both(**options) as (one, many, calls):
            return await test(one, many, calls)

    return asyncio.run(go())


def told(response):
    """All of an answer but what no two answers share."""
    headers = {name: value for name, value in response.headers.items()
               if name not in ("x-request-id", "x-hfpaged-replica", "content-length")}  # fmt: skip
    return headers, normal(response)


MESSAGES = [{"role": "user", "content": "Say something"}]
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 8}
CASES = {
    "a completion": ("POST", "/v1/completions", COMPLETION),
    "a completion as a stream": ("POST", "/v1/completions", {**COMPLETION, "stream": True}),
    "two answers and their logprobs": ("POST", "/v1/completions",
        {**COMPLETION, "n": 2, "logprobs": 1, "seed": 1, "temperature": 1.0}),
    "a chat": ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8}),
    "a chat as a stream": ("POST", "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}),
    "a response": ("POST", "/v1/responses", {"input": "Say something", "max_output_tokens": 16}),
    "a response as a stream": ("POST", "/v1/responses",
        {"input": "Say something", "max_output_tokens": 16, "stream": True}),
    "tokens": ("POST", "/tokenize", {"prompt": "Once"}),
    "models": ("GET", "/v1/models", None),
    "no such model": ("POST", "/v1/completions", {**COMPLETION, "model": "other"}),
    "a field that cannot be": ("POST", "/v1/completions", {**COMPLETION, "max_tokens": "many"}),
    "a value that cannot be": ("POST", "/v1/completions", {**COMPLETION, "temperature": -1}),
    "a prompt that is too long": ("POST", "/v1/completions", {"prompt": "x" * 1000}),
    "no JSON": ("POST", "/v1/completions", b"{"),
    "no UTF-8": ("POST", "/v1/completions", b"\xff\xfe"),
    "a long body": ("POST", "/v1/completions", {"prompt": "x" * BODY_BYTES}),
    "no such path": ("GET", "/v1/nothing", None),
    "not this method": ("GET", "/v1/completions", None),
    "the page": ("GET", "/", None),
    "the page's head": ("HEAD", "/", None),
    "the description": ("GET", "/openapi.json", None),
    "health": ("GET", "/health", None),
    "readiness": ("GET", "/ready", None),
    "an explanation": ("POST", "/v1/kv/explain", {"prompt": "Once upon a time"}),
    "forgetting": ("POST", "/v1/kv/reset", None),
}  # fmt: skip


def test_the_answers_are_those_of_one_process():
    async def test(one, many, calls):
        texts = set()
        for name, (method, path, body) in CASES.items():
            for key in ("key-a", "wrong", None):
                sent = {"json": body} if isinstance(body, dict) else {"content": body}
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answers = [await client.request(method, path, headers=headers, **sent) for client in (one, many)]
                assert told(answers[1]) == told(answers[0]), (name, key)
                texts.add(answers[1].text[-20:])
        assert set(calls.asked) == {"r0", "r1"}
        assert "data: [DONE]\n\n" in {text[-14:] for text in texts}  # streams were streams

    run(test, max_body_bytes=BODY_BYTES, **KEYS)


def test_a_full_queue_is_told_as_one_process_tells_it():
    async def refused(client):
        """One of several that come at once, where one may run and none may wait."""
        for _ in range(50):  # on a busy machine they may come one after the other
            answers = await asyncio.gather(*(client.post("/v1/completions", json=COMPLETION) for _ in range(8)))
            if found := [answer for answer in answers if answer.status_code != 200]:
                return found[0]
        raise AssertionError("none of 50 x 8 requests was refused")

    async def test(one, many, calls):
        answers = [await refused(client) for client in (one, many)]
        assert answers[0].status_code == 429
        errors = [answer.json()["error"] for answer in answers]
        words = [re.sub(r"^\d+", "some", error.pop("message")) for error in errors]  # as many as came first
        assert (errors[1], words[1]) == (errors[0], words[0])
        assert answers[1].headers["retry-after"] == "1"

    run(test, replicas=1)


def test_a_request_keeps_its_name_through_all_of_it_and_the_proxy_puts_it_into_the_answer(caplog):
    async def test(one, many, calls):
        answer = await many.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine"})
        assert "x-request-id" not in answer.headers

    with caplog.at_level("INFO", "hfpaged.access"):
        run(test)
    assert sum("/v1/completions 200" in line and " mine " in line for line in caplog.messages) == 2


def test_a_trace_that_a_client_has_begun_goes_on_in_the_replica():
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

    async def test(one, many, calls):
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        assert (await many.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200

    with tracing() as traced:
        run(test, replicas=1)
    (span,) = traced.requests
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace, parent)


def test_the_router_is_told_of_each_prompt():
    async def test(one, many, calls):
        await many.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}')
        await many.get("/v1/models")
        assert calls.hashes == [b"/v1/completions 32", b"/v1/models 0"]

    run(test)


def test_metrics_are_those_of_all_replicas():
    async def test(one, many, calls):
        for _ in range(3):
            assert (await many.post("/v1/completions", json=COMPLETION)).status_code == 200
        answer = await many.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert "hfpaged_requests_received_total{" in answer.text
        received = re.findall(r'^hfpaged_requests_received_total\{.*replica="(\w+)".*\} (\S+)$', answer.text, re.M)
        assert dict(received).keys() == {"r0", "r1"}
        assert (await many.post("/metrics")).status_code == 405

    run(test)


def test_one_replica_can_be_looked_at():
    async def test(one, many, calls):
        headers = {"Authorization": "Bearer key-a"}
        assert (await many.get("/v1/replicas")).status_code == 401
        rows = (await many.get("/v1/replicas", headers=headers)).json()
        assert [row["replica"] for row in rows["data"]] == ["r0", "r1"]
        await many.post("/v1/completions", json=COMPLETION, headers=headers)  # to r0
        totals = {}
        for name in ("r0", "r1"):
            answer = await many.get(f"/v1/kv/stats?replica={name}", headers=headers)
            totals[name] = answer.json()["totals"]
            assert answer.headers.get_list("x-hfpaged-replica") == [name]
        assert totals["r0"] != totals["r1"]
        first = (await many.get("/v1/kv/stats", headers=headers)).json()
        assert first["totals"] == totals["r0"]
        answer = await many.get("/v1/kv/stats?replica=r9", headers=headers)
        assert answer.status_code == 404
        assert "r0, r1" in answer.json()["error"]["message"]

    run(test, **KEYS)


def test_it_is_well_while_one_replica_is_and_all_forget():
    async def test(one, many, calls):
        for _ in range(2):
            await many.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 1})
        (await many.post("/v1/kv/reset")).raise_for_status()
        for name in ("r0", "r1"):
            stats = (await many.get(f"/v1/kv/stats?replica={name}")).json()
            assert stats["pool"]["blocks"]["cached"] == 0
        services = [hosted._app.state.service for hosted in calls.hosted.values()]
        services[0].is_draining = True
        assert (await many.get("/ready")).status_code == 200
        services[1].is_draining = True
        answer = await many.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")

    run(test)
