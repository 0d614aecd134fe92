"""An application that is fed in its own process, and the answers of several as one."""

import asyncio
import io
import json
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hfpaged.replicas.gathered import gathered_metrics
from hfpaged.replicas.hosting import Hosted
from hfpaged.replicas.worker_lines import JsonLines

START = {"type": "http.response.start", "status": 200, "headers": []}


def part(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


@asynccontextmanager
async def nothing():
    yield


def test_messages_come_as_they_are_made_and_all_that_are_there_at_once():
    go_on = asyncio.Event()

    async def app(scope, receive, send):
        body = (await receive())["body"]
        await send(START)
        await send(part(body + scope["path"].encode()))
        await go_on.wait()
        await send(part(b"", more=False))

    async def use():
        batches = []
        async for batch in Hosted(app, nothing).answer({"path": "/x"}, b"body of "):
            batches.append(batch)
            go_on.set()
        return batches

    assert asyncio.run(use()) == [[START, part(b"body of /x")], [part(b"", more=False)]]


def test_an_application_hears_that_its_client_has_gone():
    heard = []

    async def app(scope, receive, send):
        await receive()
        await send(START)
        heard.append((await receive())["type"])

    async def use():
        answer = Hosted(app, nothing).answer({}, b"")
        await anext(answer)
        await answer.aclose()

    asyncio.run(use())
    assert heard == ["http.disconnect"]


def test_an_application_that_fails_ends_the_answer_and_is_logged(caplog):
    async def app(scope, receive, send):
        await send(START)
        raise ZeroDivisionError("in here")

    async def use():
        return [batch async for batch in Hosted(app, nothing).answer({}, b"")]

    assert asyncio.run(use()) == [[START]]
    assert "in here" in caplog.text


def test_what_an_application_opens_it_closes_in_the_same_task():
    tasks = []

    @asynccontextmanager
    async def alive():
        tasks.append(asyncio.current_task())
        yield
        tasks.append(asyncio.current_task())

    async def use():
        hosted = Hosted(None, alive)
        await hosted.start()
        assert len(tasks) == 1
        await hosted.stop()

    asyncio.run(use())
    assert len(tasks) == 2
    assert tasks[0] is tasks[1]


def test_an_application_that_does_not_start_says_why():
    @asynccontextmanager
    async def alive():
        raise ZeroDivisionError("at the start")
        yield

    with pytest.raises(ZeroDivisionError, match="at the start"):
        asyncio.run(Hosted(None, alive).start())


METRICS = """\
# HELP hfpaged_steps_total Steps.
# TYPE hfpaged_steps_total counter
hfpaged_steps_total{{model_name="m"}} {steps}
# HELP hfpaged_wait_seconds Waits.
# TYPE hfpaged_wait_seconds histogram
hfpaged_wait_seconds_bucket{{le="1.0"}} 1.0
hfpaged_wait_seconds_bucket{{le="+Inf"}} 2.0
hfpaged_wait_seconds_count 2.0
hfpaged_wait_seconds_sum 3.5
"""


def test_metrics_of_all_replicas_say_whose_they_are_and_each_family_comes_once():
    text, kind = gathered_metrics({"a": METRICS.format(steps=1), "b": METRICS.format(steps=2)}, None)
    assert kind.startswith("text/plain")
    lines = text.decode().splitlines()
    assert 'hfpaged_steps_total{model_name="m",replica="a"} 1.0' in lines
    assert 'hfpaged_steps_total{model_name="m",replica="b"} 2.0' in lines
    assert lines.count("# TYPE hfpaged_steps_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert {sample.labels["replica"] for sample in families["hfpaged_wait_seconds"].samples} == {"a", "b"}
    assert len(families["hfpaged_wait_seconds"].samples) == 8


def test_metrics_come_in_the_format_that_is_asked_for():
    text, kind = gathered_metrics({"a": METRICS.format(steps=1)}, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


WORKER = "ServeReplica:hfpaged:Replica pid=12, ip=10.0.0.2"
NAMED = f"\x1b[36m({WORKER})\x1b[0m "
LINES = {
    "an object of a worker": (NAMED + '{"level": "info", "message": "hello"}',
                              {"level": "info", "message": "hello", "worker": WORKER}),
    "a line of a worker": (NAMED + "Loading weights: 100%",
                           {"level": "info", "logger": "ray", "message": "Loading weights: 100%",
                            "worker": WORKER}),
    "what looks like an object": ("{not really}", {"level": "info", "logger": "ray", "message": "{not really}"}),
    "a line of Ray": ("The node has been marked dead",
                      {"level": "info", "logger": "ray", "message": "The node has been marked dead"}),
}  # fmt: skip


@pytest.mark.parametrize(("line", "told"), LINES.values(), ids=LINES)
def test_lines_of_workers_are_json_where_that_is_wanted(line, told):
    target = io.StringIO()
    lines = JsonLines(target)
    print(line[:7], end="", file=lines)  # written piece by piece
    print(line[7:], file=lines)
    print(file=lines)
    (written,) = target.getvalue().splitlines()
    found = json.loads(written)
    found.pop("time", None)
    assert found == told
