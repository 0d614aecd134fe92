"""What a request passes before it is parsed: names, keys, limits, and the line that is logged."""

from __future__ import annotations

import json
import logging

import anyio
import pytest
import raw_http
from fastapi.routing import APIRoute
from served import served, wait_until
from serving import PATH, PROMPT, Counts, body, tiny_batcher

from hfpaged.serve import ServeOptions, build_app
from hfpaged.serve.app import ROUTERS
from hfpaged.serve.body import DISCARDED, read_body
from hfpaged.serve.gate import OPEN, Guarded
from hfpaged.serve.logs import JsonFormatter

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = {"ann": "key-of-ann", "bob": "key=of=bob=="}
LIMIT = 4000


@pytest.fixture(scope="module")
def batcher():
    with tiny_batcher() as batcher:
        yield batcher


@pytest.fixture(scope="module")
def server(batcher):
    options = ServeOptions(api_keys=KEYS, max_body_bytes=LIMIT, max_header_bytes=2000, send_timeout=1.0)
    with served(batcher, options, headers=bearer("ann")) as server:
        yield server


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "hfpaged.access")

    def of(path):
        def found():
            return [r for r in caplog.records if r.name == "hfpaged.access" and r.fields["path"].startswith(path)]

        wait_until(found)
        return found()

    return of


def bearer(tenant):
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


def test_a_request_keeps_its_name(server):
    named = server.client.get("/v1/models", headers={"X-Request-Id": "Trace-7:a.b/c"})
    assert named.headers["x-request-id"] == "Trace-7:a.b/c"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\tb", 'a"b', "a;b", "näme".encode()])
def test_a_name_that_is_none_is_replaced(server, name):
    answers = [server.client.get("/v1/models", headers={"X-Request-Id": name}) for _ in range(2)]
    names = {answer.headers["x-request-id"] for answer in answers}
    assert len(names) == 2
    assert all(len(found) == 32 for found in names)


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/openapi.json", "/v1/models"])
def test_head_is_get_without_a_body(server, path):
    head, get = server.client.head(path), server.client.get(path)
    assert head.status_code == get.status_code == 200
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert head.content == b""


def test_head_is_for_what_can_be_got_and_wants_the_same_key(server):
    assert server.client.head(PATH).status_code == 405
    assert server.client.head("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_refused_ones_have_names_too(server):
    refused = server.client.get("/v1/models", headers={"Authorization": "", "X-Request-Id": "mine"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "Basic key-of-ann", "key-of-ann", "Bearer key-of-anna",
                                   "Bearer \xff"])  # fmt: skip
def test_who_has_no_key_is_told_so(server, given):
    refused = server.client.post(PATH, content=b"no json", headers={"Authorization": given.encode("latin-1")})
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("tenant", KEYS)
def test_each_key_opens(server, tenant):
    assert server.client.get("/v1/models", headers=bearer(tenant)).status_code == 200


def test_pages_of_other_sites_ask_nothing_of_a_server_without_keys():
    with tiny_batcher() as batcher, served(batcher) as open_server:
        for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
            answer = open_server.client.post("/v1/kv/reset", headers={"Sec-Fetch-Site": site})
            assert answer.status_code == status, site
        assert open_server.client.get("/health", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_with_a_key_it_does_not_matter_where_a_request_comes_from(server):
    answer = server.client.post("/v1/kv/reset", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/v1/chat/completions/more"])
def test_a_path_that_is_none_is_none_with_and_without_a_key(server, path):
    without = server.client.get(path, headers={"Authorization": ""})
    assert without.status_code == server.client.get(path).status_code == 404
    assert without.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/v1/kv/stats"), ("POST", "/v1/kv/reset"), ("POST", "/tokenize"), ("POST", PATH)],
)
@pytest.mark.parametrize("tail", ["%0A", "%0a"])
def test_a_line_feed_behind_a_path_is_no_way_around_the_keys(server, method, path, tail):
    """Routes are found by regular expressions, whose end is in front of a last line feed, too."""
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(path + tail, 0, method))
        assert raw_http.status(raw_http.read_until(sock, b"\r\n\r\n")) in (401, 404)


def test_every_route_is_open_or_behind_the_keys():
    routes = [route for router in ROUTERS for route in router.routes]
    guarded = Guarded(routes)
    paths = [route.path for route in routes if isinstance(route, APIRoute)]
    assert {path for path in paths if path not in guarded} <= OPEN
    assert not any(path in guarded for path in OPEN)
    assert "/v1/models/some/model" in guarded
    assert PATH in guarded


def test_every_path_of_the_document_is_one_that_the_gate_knows(batcher):
    guarded = Guarded(route for router in ROUTERS for route in router.routes)
    for path in build_app(batcher).openapi()["paths"]:
        assert path in OPEN or path.replace("{model}", "m") in guarded, path


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/openapi.json"])
def test_who_watches_has_no_key(server, path):
    assert server.client.get(path, headers={"Authorization": ""}).status_code == 200


def padded(size):
    text = json.dumps(body(max_tokens=2))
    return (text + " " * (size - len(text))).encode()


def test_a_body_of_the_limit_is_taken_and_one_more_is_not(server):
    headers = {"Content-Type": "application/json"}
    assert server.client.post(PATH, content=padded(LIMIT), headers=headers).status_code == 200
    refused = server.client.post(PATH, content=padded(LIMIT + 1), headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    assert str(LIMIT) in refused.json()["error"]["message"]


def test_a_body_in_chunks_is_counted(server):
    def chunks(size):
        text = padded(size)
        yield from (text[i : i + 1000] for i in range(0, size, 1000))

    headers = {"Content-Type": "application/json"}
    counts = Counts(server.batcher)
    assert server.client.post(PATH, content=chunks(LIMIT), headers=headers).status_code == 200
    assert server.client.post(PATH, content=chunks(LIMIT + 1), headers=headers).status_code == 413
    assert server.client.post(PATH, content=chunks(LIMIT), headers=headers).status_code == 200
    assert counts.received == 2


@pytest.mark.parametrize("size", [LIMIT + DISCARDED + 1, 10**15])
def test_a_body_beyond_all_measure_is_refused_unread(server, size):
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(PATH, size, **bearer("ann")))
        assert raw_http.status(raw_http.read_all(sock)) == 413


def test_a_body_without_end_is_refused(server):
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(PATH, None, Transfer_Encoding="chunked", **bearer("ann")))
        chunks = (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 100
        with pytest.raises(ConnectionError):  # nobody reads any more
            sock.sendall(chunks)


def test_a_body_of_http_2_needs_no_header_that_tells_its_length():
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "http_version": "2", "headers": []}
    assert anyio.run(read_body, scope, receive, 100, 1.0)["body"] == b"{}"
    assert anyio.run(read_body, {**scope, "http_version": "1.1"}, receive, 100, 1.0)["body"] == b""


def test_who_waits_before_he_sends_is_told_before(server):
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(PATH, LIMIT + 1, Expect="100-continue", **bearer("ann")))
        assert raw_http.status(raw_http.read_until(sock, b"\r\n\r\n")) == 413


def test_a_body_that_does_not_come_is_not_waited_for(server):
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head(PATH, 100, **bearer("ann")) + b'{"prompt"')
        answer = raw_http.read_all(sock)
    assert raw_http.status(answer) == 408
    assert b"--send-timeout" in answer


@pytest.mark.parametrize("headers", [{"X": "y" * 3000}, {f"X-{i}": "y" for i in range(600)}], ids=["long", "many"])
def test_headers_beyond_the_limit_are_refused(server, headers):
    refused = server.client.get("/v1/models", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")


def test_headers_without_end_are_refused_before_they_have_ended(server):
    with raw_http.connected(server.port) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\n" + b"X: " + b"y" * 5000)
        assert raw_http.status(raw_http.read_all(sock)) == 431


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHo"], ids=["nothing", "half"])
def test_who_connects_and_says_nothing_is_let_go(server, begun):
    with raw_http.connected(server.port) as sock:
        sock.sendall(begun)
        assert raw_http.read_all(sock) == b""


def test_several_requests_come_on_one_connection(server):
    with raw_http.connected(server.port) as sock:
        for _ in range(3):
            sock.sendall(raw_http.head("/health", None, "GET", X="y" * 900))
            assert raw_http.status(raw_http.read_until(sock, b"\r\n\r\n")) == 200


def test_a_line_tells_of_each_request_and_not_what_was_written(server, lines):
    answer = server.client.post(f"{PATH}?secret=1", json=body(max_tokens=2, user="secret"))
    assert answer.status_code == 200
    (line,) = lines(PATH)
    assert line.fields | {"ms": 0} == {
        "method": "POST", "path": PATH, "status": 200, "ms": 0, "request_id": answer.headers["x-request-id"],
        "tenant": "ann",
    }  # fmt: skip
    assert "secret" not in line.getMessage()
    assert line.getMessage().startswith(f"POST {PATH} 200 ")
    told = json.loads(JsonFormatter().format(line))
    assert (told["status"], told["level"], told["logger"]) == (200, "info", "hfpaged.access")


def test_a_path_cannot_make_lines_of_its_own(server, lines):
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.head("/odd%0Apath%1b[31m" + "x" * 500, None, "GET"))
        raw_http.read_until(sock, b"\r\n\r\n")
    (line,) = lines("/odd")
    assert line.fields["path"].startswith("/odd%0Apath%1b[31mxxx")
    assert len(line.fields["path"]) < 250
    assert "\n" not in line.getMessage()


@pytest.mark.parametrize("path", ["/health", "/v1/kv/stats"])
def test_probes_and_the_page_are_told_to_who_wants_to_know_all(server, lines, path):
    assert server.client.get(path, headers=bearer("bob")).status_code == 200
    assert lines(path)[0].levelno == logging.DEBUG


def test_who_has_gone_is_logged_as_499(server, lines):
    counts = Counts(server.batcher)
    with raw_http.connected(server.port) as sock:
        sock.sendall(raw_http.request(PATH, body(stream=True), **bearer("bob")))
        raw_http.read_until(sock, b"data:")
    (line,) = lines(PATH)
    assert (line.fields["status"], line.fields["tenant"]) == (499, "bob")
    server.wait_until_idle()
    assert counts.aborted == 1


def cached(server, tenant, **rest):
    answer = server.client.post(PATH, json=body(max_tokens=1, **rest), headers=bearer(tenant))
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prefixes_are_found_under_the_same_key_and_salt_alone(server):
    most = len(PROMPT) - 1  # the last token is computed in any case
    server.batcher.pool.drop_prefixes()
    assert cached(server, "ann") == 0
    assert cached(server, "ann") == most
    assert cached(server, "bob") == 0
    assert cached(server, "ann", cache_salt="mine") == 0
    assert cached(server, "ann", cache_salt="mine") == most
    assert cached(server, "bob", cache_salt="mine") == 0  # whoever knows it gains nothing
    assert cached(server, "ann") == most
