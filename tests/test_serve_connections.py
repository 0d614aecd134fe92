"""Connections whose clients do what libraries do not: several requests at once, bodies that never end, trailers."""

from __future__ import annotations

import pytest
import raw_http
from served import served, wait_until
from serving import PATH, Counts, body, slow_steps, tiny_batcher

from hfpaged.serve import ServeOptions

pytestmark = pytest.mark.usefixtures("one_thread")
PATIENCE = 0.5  # seconds for what is to be sent
MOST = 2000  # bytes of headers


@pytest.fixture(scope="module")
def batcher():
    with tiny_batcher() as batcher:
        yield batcher


@pytest.fixture(scope="module")
def server(batcher):
    options = ServeOptions(api_keys={"ann": "key"}, send_timeout=PATIENCE, max_header_bytes=MOST)
    with served(batcher, options, headers={"Authorization": "Bearer key"}) as server:
        yield server


def asked(stream, max_tokens=200):
    return raw_http.request(PATH, body(max_tokens=max_tokens, stream=stream), Authorization="Bearer key")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [1, 3])
def test_who_goes_with_requests_behind_one_is_seen_to_go(server, stream, waiting):
    counts = Counts(server.batcher)
    with slow_steps(server.batcher, 0.02), raw_http.connected(server.port) as sock:
        sock.sendall(asked(stream))
        wait_until(lambda: counts.received == 1)
        sock.sendall(raw_http.head("/health", None, "GET") * waiting)
        sock.close()
        wait_until(lambda: counts.aborted == 1)
    assert counts.finished == 0


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /hea"])
def test_what_is_begun_behind_a_request_does_not_cut_its_answer(server, behind):
    with slow_steps(server.batcher, 0.02), raw_http.connected(server.port) as sock:
        sock.sendall(asked(True, max_tokens=100))
        raw_http.read_until(sock, b"data: ")
        sock.sendall(behind)
        assert b"[DONE]" in raw_http.read_all(sock)  # and it is closed after all


@pytest.mark.parametrize("more", [b"", b"x"])
def test_a_body_that_was_refused_and_does_not_end_is_not_waited_for(server, more):
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(PATH, 100))  # without a key
        answer = raw_http.read_until(sock, b"}}")
        sock.sendall(more)
        assert raw_http.status(answer) == 401
        assert raw_http.read_all(sock) == b""


def test_a_refused_body_that_ends_leaves_the_connection_as_it_was(server):
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(PATH, 10))
        raw_http.read_until(sock, b"}}")
        sock.sendall(b"0123456789" + raw_http.head("/health", None, "GET"))
        assert raw_http.status(raw_http.read_until(sock, b"\r\n\r\n")) == 200


@pytest.mark.parametrize("key", ["", "Bearer key"])
@pytest.mark.parametrize("line", [b"x: " + b"y" * 500 + b"\r\n", b"y" * 500])
def test_trailers_without_end_are_not_kept(server, key, line):
    with raw_http.connected(server.port) as sock:
        sock.sendall(
            raw_http.head(PATH, None, Transfer_Encoding="chunked", Authorization=key) + b"2\r\n{}\r\n0\r\nx: y"
        )
        with pytest.raises(ConnectionError):
            sock.sendall(line * 200_000)


def test_a_client_of_the_jdk_may_ask_for_http_2(server):
    """It does so with every request, and goes on with HTTP/1.1 where it gets no answer to that."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    for _ in range(2):
        answer = server.client.post(PATH, json=body(max_tokens=2), headers=upgrade)
        assert answer.status_code == 200
