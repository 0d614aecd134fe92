"""Spans and metrics reach a real collector of OTLP, rotel; and one that is not there harms nobody."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from otlp_worker import SIZES
from prometheus_client import CollectorRegistry
from test_batcher_tokens import batcher_of, checked, greedy, prompts

from hfpaged import telemetry
from hfpaged.telemetry import delivery_log, providers

rotel = pytest.importorskip("rotel", reason="no collector: pip install 'hfpaged[test]'")

# Everything is sent soon: the tests wait for it.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Collector:
    """A running rotel, and what it says that it received."""

    def __init__(self, folder):
        self.grpc, self.http = free_port(), free_port()
        self._log = folder / "log"
        program = Path(rotel.__file__).parent / "rotel-agent"
        line = [
            program, "start", "--pid-file", folder / "pid", "--log-file", folder / "own-log",
            "--otlp-grpc-endpoint", f"127.0.0.1:{self.grpc}", "--otlp-http-endpoint", f"127.0.0.1:{self.http}",
            "--exporter", "blackhole", "--debug-log", "traces", "--debug-log", "metrics",
            "--debug-log-verbosity", "detailed",
        ]  # fmt: skip
        with self._log.open("w") as log:
            self._process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        self._wait(lambda: all(is_open(port) for port in (self.grpc, self.http)))

    def _wait(self, is_there):
        ends = time.monotonic() + 120
        while not is_there():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < ends, self._log.read_text()[-3000:]
            time.sleep(0.05)

    def received(self, *texts):
        """Its log, as soon as all of these are in it."""
        self._wait(lambda: all(text in self._log.read_text() for text in texts))
        return self._log.read_text()

    def close(self):
        self._process.terminate()
        self._process.wait(10)


def is_open(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def collector(tmp_path):
    collector = Collector(tmp_path)
    yield collector
    collector.close()


def run_worker(python, rounds=1, seconds=0.0, **environment):
    """The worker's records, what it wrote besides, and the seconds that it took to end after its last word."""
    done = subprocess.run(
        [python, Path(__file__).parent / "otlp_worker.py", str(rounds), str(seconds)],
        capture_output=True, text=True, timeout=120, env=os.environ | SOON | environment,
    )  # fmt: skip
    ended = time.time()
    assert done.returncode == 0, done.stderr
    record, last = map(json.loads, done.stdout.splitlines())
    *rounds_of_tokens, (call,) = record["tokens"]
    assert all(tokens == greedy("llama") for tokens in rounds_of_tokens)
    assert call == [greedy("llama")[0]]
    return record | last, done.stderr, ended - last["left"]


class Sent:
    """A span as rotel prints it."""

    def __init__(self, text):
        self.trace, self.parent, self.id, self.name, self.kind = (
            re.search(rf"^    {label} *: (.*)$", text, re.MULTILINE)[1].strip()
            for label in ("Trace ID", "Parent ID", "ID", "Name", "Kind")
        )
        self.text = text


def spans_in(log):
    return [Sent(part) for part in re.split(r"^Span #\d+$", log, flags=re.MULTILINE)[1:]]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_and_metrics_of_a_run_arrive(warm, collector, protocol):
    is_grpc = protocol == "grpc"
    port, name = (collector.grpc, {}) if is_grpc else (collector.http, {"OTEL_SERVICE_NAME": "mine"})
    run_worker(
        warm, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test", **name,
    )  # fmt: skip
    log = collector.received("ResourceSpans", "gen_ai.server.request.duration")
    assert f"-> service.name: Str({'hfpaged' if is_grpc else 'mine'})" in log
    assert "-> deployment.environment.name: Str(test)" in log
    spans = spans_in(log)
    roots = [span for span in spans if span.name == "text_completion LlamaForCausalLM"]
    assert len(roots) == 7  # six requests and a call of generate()
    assert {span.kind for span in spans} == {"SPAN_KIND_INTERNAL"}
    for root in roots:
        names = [span.name for span in spans if span.parent == root.id and span.trace == root.trace]
        assert {"prefill", "decode"} <= set(names) <= {"queue", "prefill", "decode"}
        assert "-> gen_ai.usage.output_tokens: Int(12)" in root.text
    assert any("-> Name: preempted" in root.text for root in roots)
    assert "gen_ai.server.time_to_first_token" in log
    assert "hfpaged.kv.usage_ratio" in log
    finished = log.rsplit("hfpaged.requests.finished", 1)[1].split("Metric #")[0]
    assert re.search(r"finish_reason: Str\(length\)\n.*\n.*\nValue: 6$", finished, re.MULTILINE)


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def refusing():
    """The port of a server that has no time."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent():
    """The port of a server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield listener.getsockname()[1]


def test_no_receiver_changes_no_token_and_is_said_once(warm):
    sizes = {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16"}
    record, said, ending = run_worker(
        warm, 10, 1.0, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}", **sizes
    )
    lines = [line for line in said.splitlines() if re.search(r"telemetry|OTLP|xport|Queue full", line)]
    assert len(lines) == 1, lines
    assert lines[0].startswith("telemetry is not delivered")
    assert 0 < record["queued"] <= 64
    assert max(record["flushed"], ending) < 30  # an exporter that nobody hurries tries for a minute and more


def exporters(protocol, port):
    kind = "grpc" if protocol == "grpc" else "http"
    package = f"opentelemetry.exporter.otlp.proto.{kind}"
    endpoint = f"http://127.0.0.1:{port}"
    spans, metrics = (importlib.import_module(f"{package}.{name}_exporter") for name in ("trace", "metric"))
    paths = ("", "") if kind == "grpc" else ("/v1/traces", "/v1/metrics")
    return spans.OTLPSpanExporter(endpoint + paths[0]), metrics.OTLPMetricExporter(endpoint + paths[1])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("kind", ["silent", "refusing"])
def test_a_receiver_that_does_not_take_it_changes_no_token_and_is_said_once(
    request, monkeypatch, caplog, kind, protocol
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    spans, metrics = exporters(protocol, request.getfixturevalue(kind))
    expected = greedy("llama")
    tracers = TracerProvider()
    tracers.add_span_processor(
        BatchSpanProcessor(spans, max_queue_size=64, max_export_batch_size=64, schedule_delay_millis=50)
    )
    meters = MeterProvider([PeriodicExportingMetricReader(metrics, export_interval_millis=100)])
    undo = delivery_log.say_once()
    telemetry.instrument(tracers, meters, CollectorRegistry())
    try:
        ends = time.monotonic() + 1.2
        while time.monotonic() < ends:
            batcher = batcher_of("llama", **SIZES)
            outputs = batcher.generate(prompts(), max_new_tokens=12, do_sample=False)
            assert [output.token_ids for output in outputs] == expected
            assert len(tracers._active_span_processor._span_processors[0]._batch_processor._queue) <= 64
            checked(batcher)
    finally:
        telemetry.uninstrument()
        is_over = providers.shut_down(tracers, meters)
        undo()
    assert is_over
    said = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert len(said) == 1, said
    assert said[0].startswith("telemetry is not delivered")
