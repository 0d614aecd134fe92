"""The end of a server: those under way come to their end in time, the others are told, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time

import fastapi
import forked
import httpx
import pytest
import raw_http
from served import PATIENCE, assert_nothing_left, served, wait_until
from served_command import command
from serving import PATH, Counts, body, save, slow_steps, tiny_batcher
from starlette.testclient import TestClient

from hfpaged import cli
from hfpaged.serve import ServeOptions, build_app
from hfpaged.serve.completion_answer import CompletionAnswer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def batcher():
    with tiny_batcher() as batcher:
        yield batcher


class Streaming(threading.Thread):
    """A client with a long answer; `text` is what came of it."""

    def __init__(self, url, **rest):
        super().__init__(daemon=True)
        self.text, self.status, self._url, self._rest = "", None, url, rest
        self.start()
        wait_until(lambda: "data: " in self.text or not self.is_alive())

    def run(self):
        asked = {"json": body(stream=True, **self._rest), "timeout": 60}
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", self._url + PATH, **asked) as got:
            self.status = got.status_code
            for part in got.iter_text():
                self.text += part

    def whole(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.text.rstrip()


def test_who_is_under_way_ends_and_who_comes_is_refused(batcher):
    counts = Counts(batcher)
    with served(batcher) as server:
        with slow_steps(batcher), raw_http.connected(server.port) as there:
            there.sendall(raw_http.head("/health", None, "GET"))
            raw_http.read_until(there, b"\r\n\r\n")
            client = Streaming(server.url, max_tokens=120)
            server.uvicorn.handle_exit(signal.SIGTERM, None)
            ready = httpx.get(server.url + "/ready")
            refused = httpx.post(server.url + PATH, json=body())
            there.sendall(raw_http.request(PATH, body()))
            answer = raw_http.read_all(there)
            alive = httpx.get(server.url + "/health")
            text = client.whole()
        wait_until(lambda: server.service.engine is None)
    assert text.endswith("data: [DONE]")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert raw_http.status(answer) == 503
    assert alive.status_code == 200
    assert (counts.finished, counts.aborted, counts.received) == (1, 0, 1)


def test_whose_prompt_is_being_read_when_it_stops_gets_an_answer(batcher, monkeypatch):
    is_read, may_go, read = threading.Event(), threading.Event(), CompletionAnswer.submissions

    def slowly(answer):
        is_read.set()
        assert may_go.wait(PATIENCE)
        return read(answer)

    monkeypatch.setattr(CompletionAnswer, "submissions", slowly)
    with served(batcher) as server, raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.request(PATH, body(stream=True, max_tokens=5)))
        assert is_read.wait(PATIENCE)
        server.uvicorn.handle_exit(signal.SIGTERM, None)
        time.sleep(0.5)  # in which it would have stopped
        may_go.set()
        assert b"[DONE]" in raw_http.read_all(sock)


@pytest.mark.parametrize("signals", [1, 2], ids=["when the time is over", "when it is told twice"])
def test_who_does_not_end_is_told(batcher, signals):
    counts = Counts(batcher)
    options = ServeOptions(shutdown_timeout=0.2 if signals == 1 else 1000.0)
    whole = {}
    with served(batcher, options) as server, slow_steps(batcher, 0.05):
        client = Streaming(server.url)
        asking = threading.Thread(
            target=lambda: whole.update(answer=httpx.post(server.url + PATH, json=body(), timeout=60))
        )
        asking.start()
        wait_until(lambda: counts.in_flight == 2)
        for _ in range(signals):
            server.uvicorn.handle_exit(signal.SIGINT, None)
        text = client.whole()
        asking.join(PATIENCE)
        wait_until(lambda: server.service.engine is None)
    assert "shutting_down" in text.rpartition("data: ")[2]
    assert "[DONE]" not in text
    assert (whole["answer"].status_code, whole["answer"].json()["error"]["code"]) == (503, "shutting_down")
    assert (counts.finished, counts.aborted) == (0, 2)


def test_a_foreign_server_that_ends_the_application_early_lets_it_drain(batcher):
    """By the lifespan alone, while a request is under way."""
    app = build_app(batcher, ServeOptions(shutdown_timeout=20.0))
    counts = Counts(batcher)
    found = []
    with TestClient(app) as client, slow_steps(batcher):
        thread = threading.Thread(target=lambda: found.append(client.post(PATH, json=body(max_tokens=60))))
        thread.start()
        wait_until(lambda: counts.in_flight == 1)
    thread.join(PATIENCE)
    assert found[0].status_code == 200
    assert_nothing_left(batcher)
    assert counts.finished == 1


def test_mounted_in_another_application_it_serves_once_that_one_starts_it(batcher):
    for starts, status in ((True, 200), (False, 503)):
        sub = build_app(batcher)
        outer = fastapi.FastAPI(lifespan=(lambda app, sub=sub: sub.router.lifespan_context(sub)) if starts else None)
        outer.mount("/llm", sub)
        with TestClient(outer) as client:
            answer = client.post("/llm" + PATH, json=body(max_tokens=3))
            assert answer.status_code == status
            assert client.get("/llm/health").status_code == status
    assert answer.json()["error"]["code"] == "not_started"
    assert_nothing_left(batcher)


def test_an_application_can_start_again(batcher):
    app = build_app(batcher)
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post(PATH, json=body(max_tokens=3)).status_code == 200
    assert_nothing_left(batcher)


def test_ready_says_no_until_the_first_forwards_have_been_made(batcher, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(batcher, "warm_up", lambda: go_on.wait(PATIENCE), raising=False)
    with TestClient(build_app(batcher)) as client:
        cold = client.get("/ready")
        assert client.get("/health").status_code == 200
        go_on.set()
        wait_until(lambda: client.get("/ready").status_code == 200)
    assert (cold.status_code, cold.json()["error"]["code"]) == (503, "warming_up")
    assert "retry-after" in cold.headers


def test_warming_up_is_not_counted_and_leaves_nothing(batcher):
    counts = Counts(batcher)
    batcher.warm_up()
    assert (counts.received, counts.finished) == (0, 0)
    assert_nothing_left(batcher)
    with tiny_batcher(num_blocks=4) as small:  # too few blocks for it
        small.warm_up()
        assert_nothing_left(small)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that `hfpaged serve` can load."""
    return save(tmp_path_factory.mktemp("tiny"))


def test_the_command_serves_until_sigterm_lets_requests_end_and_exits_with_0(folder):
    flags = ("--served-model-name", "tiny", "--block-size", "4")
    with command(folder, *flags, start=forked.as_people_do) as server:
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["id"] == "tiny"
        said = server.output.read_text()
        client = Streaming(server.url)
        server.process.send_signal(signal.SIGTERM)
        text = client.whole()
        assert server.process.wait(PATIENCE) == 0
        told = server.errors.read_text()
    assert text.endswith("data: [DONE]")
    for row in ("weights", "activation peak", "pool", "blocks", "tokens", "requests that fit", "address"):
        assert row in said
    assert "none: everybody is let in" in said
    assert f"POST {PATH} 200 " in told
    assert "stopped" in told.splitlines()[-1]
    assert "Traceback" not in told


def test_a_second_ctrl_c_ends_at_once_and_what_is_logged_is_json(folder):
    flags = ("--log-json", "--shutdown-timeout", "1000", "--block-size", "4", "--max-num-seqs", "8")
    with command(folder, *flags) as server:
        asking = Streaming(server.url, prompt=[[5] * 8] * 8, max_tokens=240, logprobs=5)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        text = asking.whole()
        assert server.process.wait(PATIENCE) == 0
        assert server.output.read_text() == ""
        lines = server.errors.read_text().splitlines()
    assert "shutting_down" in text.rpartition("data: ")[2]
    told = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in told)
    assert [line["path"] for line in told if line["logger"] == "hfpaged.access"] == [PATH]
    assert {"weights_bytes", "num_blocks", "requests_of_max_length"} <= set().union(*told)


def test_an_address_that_is_taken_is_told_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "no-such-model", "--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in told
    assert "no-such-model" not in told
