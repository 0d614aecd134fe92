"""`hfpaged doctor`: where it reads from, what it prints, how it exits."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from exposition import exposition

from hfpaged import cli
from hfpaged.doctor import sources

HEALTHY = exposition(requests_running=0)
THRASH = exposition(requests_running=0, preempted_tokens_total=90_000)


def run(capsys, *words):
    code = cli.main(["doctor", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "metrics.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write


class Server(ThreadingHTTPServer):
    """Answers paths with what `pages` has for them: a text, a list of texts one after the other, or a status."""

    daemon_threads = True

    def __init__(self, pages):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages, self.asked, self.delay = pages, [], 0.0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        time.sleep(self.server.delay)
        page = self.server.pages.get(self.path, 404)
        if isinstance(page, list):
            page = page.pop(0) if len(page) > 1 else page[0]
        self.send_response_only(page if isinstance(page, int) else 200)
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked may have gone
            self.wfile.write(b"" if isinstance(page, int) else page.encode())

    def log_message(self, *words):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(pages):
        server = Server(pages)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_healthy_engine_exits_0_with_the_figures(capsys, file):
    code, out, err = run(capsys, file(HEALTHY))
    assert (code, err) == (0, "")
    assert out.startswith("tiny: all is well\n")
    for words in ("80 % full", "60 % of prompt tokens", "p50 375 ms, p95 488 ms", "415 tokens/s"):
        assert words in out


def test_a_problem_exits_1_and_is_told_in_lines_of_a_terminals_width(capsys, file):
    code, out, _ = run(capsys, file(THRASH))
    assert code == 1
    assert "PROBLEM  Preemption thrash: the same tokens are computed again and again\n" in out
    assert "  because  5 preemptions took back 90,000 stored tokens" in out
    assert "  remedy   max_num_seqs 32 -> 16" in out
    assert max(map(len, out.splitlines())) <= 100


def test_advice_exits_0(capsys, file):
    code, out, _ = run(capsys, file(exposition(requests_running=0, requests_aborted_total=300)))
    assert code == 0
    assert "tiny: 1 piece of advice\n" in out
    assert "ADVICE  Many requests are given up" in out


def test_what_was_not_judged_is_said(capsys, file):
    code, out, _ = run(capsys, file(exposition(preempted_tokens_total=None, requests_running=0)))
    assert code == 0
    assert "not judged: preemption-thrash (lacks hfpaged_preempted_tokens_total)\n" in out


def test_json_has_all_of_it(capsys, file):
    path = file(THRASH)
    code, out, _ = run(capsys, path, "--json")
    answer = json.loads(out)
    assert (answer["source"], answer["interval"], answer["exit_code"], code) == (str(path), None, 1, 1)
    (model,) = answer["models"]
    assert (model["model_name"], model["verdict"], model["notes"], model["not_judged"]) == ("tiny", "1 problem", [], {})
    assert model["figures"]["hit_rate"] == 0.6
    assert model["figures"]["pool_use"] == pytest.approx(0.8)
    (finding,) = model["findings"]
    assert set(finding) == {"severity", "title", "evidence", "remedy", "rule"}
    assert (finding["rule"], finding["severity"]) == ("preemption-thrash", "problem")


def test_all_models_are_told_or_the_one_that_is_named(capsys, file):
    path = file(exposition("a", requests_running=0) + exposition("b", preempted_tokens_total=90_000))
    code, out, _ = run(capsys, path)
    assert code == 1
    assert "a: all is well" in out
    assert "b: 1 problem" in out
    code, out, _ = run(capsys, path, "--model-name", "a")
    assert code == 0
    assert "b: " not in out
    code, _, err = run(capsys, path, "--model-name", "c")
    assert code == 2
    assert "no model is named 'c'" in err


def test_standard_input_is_as_good_as_a_file(capsys, monkeypatch):
    stuck = exposition(stalled_seconds=100)
    monkeypatch.setattr("sys.stdin", io.StringIO(stuck))
    code, out, _ = run(capsys, "-")
    assert code == 1
    assert "100 s an engine" in out


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/metrics/"])
def test_a_url_may_lack_metrics(capsys, serve, path):
    server = serve({"/metrics": HEALTHY, "/metrics/": HEALTHY})
    assert run(capsys, server.url + path)[0] == 0
    assert len(server.asked) == 1


def test_a_url_may_lack_its_scheme_or_have_a_path_of_its_own(capsys, serve):
    server = serve({"/inner/metrics": HEALTHY, "/own": HEALTHY, "/metrics": THRASH})
    assert run(capsys, server.url.removeprefix("http://"))[0] == 1
    assert run(capsys, f"{server.url}/inner")[0] == 0
    assert run(capsys, f"{server.url}/own")[0] == 0
    assert server.asked == ["/metrics", "/inner/metrics", "/own/metrics", "/own"]


def test_an_interval_judges_what_happens_in_it(capsys, serve):
    before = exposition(requests_running=0, preempted_tokens_total=90_000)
    after = exposition(
        requests_running=0, preempted_tokens_total=90_000, computed_tokens_total={"prefill": 10**6},
        request_duration_seconds=[(10.0, 1030)],
    )  # fmt: skip
    server = serve({"/metrics": [before, after]})
    code, out, _ = run(capsys, server.url, "--interval", "0.1")
    assert code == 0
    assert "30 requests ended in 1" in out  # ms
    assert len(server.asked) == 2
    server.pages["/metrics"] = [after, exposition(requests_running=0, preempted_tokens_total=990_000)]
    assert run(capsys, server.url, "--interval", "0.1")[0] == 1


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ({}, "answers 404 Not Found; give the address of /metrics"),
        ({"/metrics": 503}, "answers 503"),
        ({"/metrics": "<html></html>\n"}, "is no metrics in Prometheus's text format"),
        ({"/metrics": "vllm:num_requests_running 1\n"}, "has metrics of vLLM, not of hfpaged"),
        ({"/metrics": ""}, "hfpaged.telemetry.instrument()"),
    ],
)
def test_a_url_that_has_nothing_for_us_exits_2_with_one_line(capsys, serve, pages, words):
    server = serve(pages)
    code, out, err = run(capsys, server.url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"hfpaged: error: {server.url}/metrics ")
    assert words in err


def test_who_does_not_answer_is_waited_for_no_longer_than_was_said(capsys, serve):
    server = serve({"/metrics": HEALTHY})
    server.delay = 5.0
    code, _, err = run(capsys, server.url, "--timeout", "0.2")
    assert code == 2
    assert "does not answer within 0.2 s" in err
    server.delay = 0.0


def test_who_is_not_there_is_an_error(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        code, _, err = run(capsys, f"localhost:{port}")
    assert code == 2
    assert f"http://localhost:{port}/metrics does not answer" in err
    assert "is the process up?" in err


def test_an_answer_without_end_is_refused(capsys, serve, monkeypatch):
    monkeypatch.setattr(sources, "MOST_BYTES", 1000)
    code, _, err = run(capsys, serve({"/metrics": HEALTHY}).url)
    assert code == 2
    assert "more than 1,000 bytes" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/no/such/file"], "is no URL and cannot be read as a file (No such file or directory)"),
        (["."], "cannot be read as a file"),
        (["ftp://host/metrics"], "give http://HOST:PORT"),
        (["http://"], "give http://HOST:PORT"),
        (["metrics.txt", "--interval", "5"], "--interval reads twice, and metrics.txt stays as it is"),
        (["-", "--interval", "5"], "--interval reads twice"),
        (["localhost:1", "--interval", "0"], "--interval 0 is no time to wait"),
        (["localhost:1", "--interval", "nan"], "--interval nan is no time to wait"),
        (["localhost:1", "--timeout", "-1"], "--timeout -1 waits for no answer"),
    ],
)
def test_what_cannot_be_read_exits_2_with_one_line(capsys, words, told):
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_file_that_is_no_text_is_an_error(capsys, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)))
    code, _, err = run(capsys, path)
    assert code == 2
    assert "is no text" in err


def test_help_has_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["doctor", "--help"])
    out = capsys.readouterr().out
    assert "hfpaged doctor http://localhost:9464" in out
    assert "exit codes: 0" in out


BROKEN = {
    "no HTTP": (b"\0\1\2 nothing\r\n\r\n", "does not answer"),
    "chunks that are none": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc", "does not answer"),
    "too many headers": (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 500 + b"\r\n", "does not answer"),
    "cut off": (b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\nhfpaged_kv_usage_ratio 0.5\n", "too early"),
    "bytes": (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(range(256)) * 20, "is no text"),
    "one long line": (b"HTTP/1.1 200 OK\r\n\r\n<html>" + b"a" * 10**6, "is no metrics"),
    "a slow one": (None, "bytes have come"),
}


@pytest.mark.parametrize(("answer", "words"), BROKEN.values(), ids=BROKEN)
def test_whatever_answers_the_error_is_one_short_line(capsys, answer, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_raw, args=(server, answer))
        thread.start()
        began = time.monotonic()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        code, out, err = run(capsys, url, "--timeout", "0.5")
        assert time.monotonic() - began < 3
        thread.join()
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert len(err) < 400
    assert err.strip().isprintable()


def answer_raw(server, answer):
    connection, _ = server.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(65536)
        if answer is not None:
            connection.sendall(answer)
            return
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(50):  # each byte comes in time
            connection.sendall(b"a")
            time.sleep(0.1)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://localhost:port/metrics", "http://a b/metrics", "http://h:1/\x7f"]
)
def test_an_address_that_is_none_is_an_error_in_a_sentence(capsys, url):
    code, _, err = run(capsys, url)
    assert code == 2
    assert err.startswith("hfpaged: error: http://")


def test_a_password_in_an_address_is_not_printed(capsys):
    code, _, err = run(capsys, "http://me:secret@localhost:9464/metrics")
    assert code == 2
    assert "secret" not in err
    assert "a password for localhost:9464 is not sent" in err


@pytest.mark.parametrize("option", ["--timeout", "--interval"])
def test_nobody_waits_for_longer_than_a_clock_can_count(capsys, option):
    code, _, err = run(capsys, "localhost:9", option, "1e300")
    assert code == 2
    assert f"{option} 1e+300" in err


def test_bytes_on_standard_input_and_files_without_an_end_are_errors(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8"))
    code, _, err = run(capsys, "-")
    assert (code, "standard input is no text" in err) == (2, True)
    monkeypatch.setattr(sources, "MOST_BYTES", 1000)
    code, _, err = run(capsys, "/dev/zero")
    assert (code, "/dev/zero has more than 1,000 bytes" in err) == (2, True)
