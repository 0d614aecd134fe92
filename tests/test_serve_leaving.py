"""Clients that go, at any moment: what they asked for is given up, and others never notice."""

from __future__ import annotations

import threading
import time

import httpx
import pytest
import raw_http
from served import served, wait_until
from serving import PATH, PROMPT, Counts, body, slow_steps, tiny_batcher

from hfpaged.serve import ServeOptions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def batcher():
    with tiny_batcher() as batcher:
        yield batcher


@pytest.fixture
def server(batcher):
    with served(batcher) as server, slow_steps(batcher):
        yield server
        server.wait_until_idle()
        Counts(batcher).check()


def running(server):
    return len(server.batcher.requests_with_blocks())


def steps_until(server, holds):
    """How many steps are made until then."""
    engine = server.batcher.loop.engine
    before = engine.num_steps
    wait_until(holds)
    return engine.num_steps - before


def test_gone_before_its_body_is_there(server):
    counts = Counts(server.batcher)
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(PATH, 1000) + b'{"prompt": [')
        time.sleep(0.05)
    server.client.get("/health")
    assert counts.received == 0


def test_gone_while_it_waits_in_the_queue(server):
    counts = Counts(server.batcher)
    seats = server.batcher.limits["max_num_seqs"]
    with raw_http.connected(server.port) as first, raw_http.connected(server.port) as second:
        first.sendall(raw_http.request(PATH, body([PROMPT] * seats, 60)))
        wait_until(lambda: running(server) == seats)
        second.sendall(raw_http.request(PATH, body()))
        wait_until(lambda: counts.in_flight == seats + 1)
        second.close()
        wait_until(lambda: counts.aborted == 1)
        assert running(server) == seats
        assert raw_http.status(raw_http.read_until(first, b"}]")) == 200
    server.wait_until_idle()
    assert (counts.aborted, counts.finished) == (1, seats)


def test_gone_while_its_prompt_is_computed(server):
    counts = Counts(server.batcher)
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.request(PATH, body([5 + i % 90 for i in range(230)], 5)))
        wait_until(lambda: running(server) == 1)
    assert steps_until(server, lambda: running(server) == 0) <= 4  # two, and those until the close has come here
    server.wait_until_idle()
    assert (counts.aborted, counts.finished) == (1, 0)


SHAPES = {
    "one": (body(), 1),
    "three samples": (body(n=3, temperature=1.0, seed=1), 1),
    "a list of prompts": (body([PROMPT, PROMPT[:7], PROMPT[3:]]), 3),
}


@pytest.mark.parametrize(("asked", "requests"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_gone_in_the_middle_of_an_answer(server, asked, requests, stream):
    counts = Counts(server.batcher)
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.request(PATH, asked | {"stream": stream}))
        if stream:
            raw_http.read_until(sock, b"data:")
        wait_until(lambda: running(server) == requests)
    assert steps_until(server, lambda: running(server) == 0) <= 4
    server.wait_until_idle()
    assert (counts.received, counts.aborted, counts.finished) == (requests, requests, 0)


def test_neighbours_have_the_same_tokens_while_others_come_and_go(server):
    expected = server.client.post(PATH, json=body(max_tokens=80)).json()["choices"][0]
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            with raw_http.connected(server.port) as sock:
                sock.sendall(raw_http.request(PATH, body(PROMPT[5:], stream=True)))
                raw_http.read_until(sock, b"data:")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        found = server.client.post(PATH, json=body(max_tokens=80, return_token_ids=True)).json()["choices"][0]
    finally:
        stop.set()
        thread.join()
    assert found["finish_reason"] == expected["finish_reason"] == "length"
    assert found["text"] == expected["text"]


def test_a_reader_who_does_not_read_is_given_up(batcher, caplog):
    """And its connection closed: what was sent and not read is thrown away."""
    prompts = [PROMPT[i:] for i in range(8)]
    asked = raw_http.request(PATH, body(prompts, 220, stream=True, logprobs=5))
    with served(batcher, ServeOptions(send_timeout=0.4), send_buffer=4096) as server, slow_steps(batcher, 0.005):
        counts = Counts(batcher)
        with raw_http.connected(server.port, receive_buffer=2048) as sock:
            sock.sendall(asked)
            wait_until(lambda: counts.aborted > 0)
            server.wait_until_idle()
            wait_until(lambda: "unread" in caplog.text)
            told = raw_http.read_all(sock)
        assert told.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in told
        assert len(told) < 100_000  # of more than 500,000 that there would have been
        assert server.client.get("/health").status_code == 200
        counts.check()


def test_the_queue_is_full_at_once(batcher):
    with tiny_batcher(max_num_seqs=1, max_num_queued_requests=1) as small, served(small) as server:
        counts = Counts(small)
        with slow_steps(small), raw_http.connected(server.port) as first, raw_http.connected(server.port) as second:
            for sock in (first, second):
                sock.sendall(raw_http.request(PATH, body(stream=True)))
            wait_until(lambda: counts.in_flight == 2)
            refused = server.client.post(PATH, json=body())
            ready = server.client.get("/ready")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "queue_full")
        assert "retry-after" in ready.headers
        server.wait_until_idle()
        assert server.client.get("/ready").status_code == 200
        assert (counts.rejected, counts.aborted) == (1, 2)
        counts.check()


def test_a_prompt_that_cannot_fit_is_told_the_numbers_and_neighbours_go_on(server):
    expected = server.client.post(PATH, json=body(max_tokens=60)).json()["choices"][0]["text"]
    with server.client.stream("POST", PATH, json=body(max_tokens=60, stream=True)) as stream:
        refused = httpx.post(server.url + PATH, json=body([7] * 250, 200))
        text = "".join(stream.iter_text())
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert all(number in error["message"] for number in ("250", "200", "256"))
    assert text.rstrip().endswith("data: [DONE]")
    assert expected == server.client.post(PATH, json=body(max_tokens=60)).json()["choices"][0]["text"]


@pytest.fixture
def impatient(batcher):
    with served(batcher, ServeOptions(request_timeout=0.3)) as server, slow_steps(batcher, 0.03):
        yield server


def test_a_request_that_takes_too_long_is_told_so(impatient):
    counts = Counts(impatient.batcher)
    late = impatient.client.post(PATH, json=body())
    assert (late.status_code, late.json()["error"]["code"]) == (503, "request_timeout")
    assert "0.3 seconds" in late.json()["error"]["message"]
    assert "retry-after" in late.headers
    impatient.wait_until_idle()
    assert counts.aborted == 1


def test_a_stream_that_takes_too_long_ends_with_an_error(impatient):
    counts = Counts(impatient.batcher)
    with impatient.client.stream("POST", PATH, json=body(stream=True)) as late:
        text = "".join(late.iter_text())
    assert late.status_code == 200
    assert text.count("data: ") > 1
    assert "request_timeout" in text.rstrip().rpartition("data: ")[2]
    assert "[DONE]" not in text
    impatient.wait_until_idle()
    assert counts.aborted == 1
