"""instrument() and uninstrument(), by hand and by `opentelemetry-instrument`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from test_batcher_tokens import batcher_of, checked, prompts
from traced import Traced, unpatched
from transformers import GenerationMixin

from hfpaged import generation_events, telemetry
from hfpaged.engine import registry
from hfpaged.errors import InvalidConfigError
from hfpaged.telemetry import instrumenting
from hfpaged.telemetry.instrumenting import HfpagedInstrumentor

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 3, "do_sample": False}
HEAVY = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"


@pytest.fixture
def traced():
    yield Traced()
    if instrumenting.is_instrumented():
        telemetry.uninstrument()


def instrument(traced, registry=None):
    telemetry.instrument(traced.provider, registry=registry or CollectorRegistry())


def run_python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "line", ["from hfpaged import telemetry", "telemetry.instrument()", "telemetry.uninstrument()"]
)
def test_neither_torch_nor_transformers_is_loaded(line):
    lines = ["from hfpaged import telemetry", "telemetry.instrument()", "telemetry.uninstrument()"]
    code = "\n".join(["import sys", *lines[: lines.index(line) + 1], f"print({HEAVY})"])
    assert run_python(code).strip() == "set()"


def test_importing_configures_nothing():
    code = "import hfpaged.telemetry, sys; print(sorted(name for name in sys.modules if 'opentelemetry' in name))"
    assert run_python(code).strip() == "[]"


def test_batchers_of_before_and_after_are_traced_until_it_is_undone(traced):
    before, generate = batcher_of("llama"), GenerationMixin.generate
    hooks = list(before.hooks)
    instrument(traced)
    assert GenerationMixin.generate is not generate
    after = batcher_of("llama")
    for batcher in (before, after):
        batcher.generate(prompts((5,)), **GREEDY)
    assert len(traced.requests) == 2
    telemetry.uninstrument()
    assert before.hooks == hooks
    for batcher in (before, after, batcher_of("llama")):
        batcher.generate(prompts((5,)), **GREEDY)
        checked(batcher)
    assert len(traced.requests) == 2
    assert not generation_events.is_watched()
    assert GenerationMixin.generate is generate
    assert not registry._makers


def test_the_metrics_of_prometheus_are_there_until_it_is_undone(traced):
    prometheus = CollectorRegistry()
    instrument(traced, prometheus)
    batcher = batcher_of("llama")
    batcher.generate(prompts((5,)), **GREEDY)
    assert b"hfpaged_requests_finished_total" in generate_latest(prometheus)
    telemetry.uninstrument()
    assert generate_latest(prometheus) == b""
    checked(batcher)


def test_a_second_time_changes_nothing_and_says_so(traced, caplog):
    instrument(traced)
    telemetry.instrument(Traced().provider)
    assert "instrumented already" in caplog.text
    batcher = batcher_of("llama")
    batcher.generate(prompts((5,)), **GREEDY)
    assert len(traced.requests) == 1
    checked(batcher)


def test_undoing_what_is_not_there_says_so(caplog):
    telemetry.uninstrument()
    assert "not instrumented" in caplog.text


def test_it_can_be_done_again_after_it_was_undone(traced):
    for count in (1, 2):
        instrument(traced)
        batcher = batcher_of("llama")
        batcher.generate(prompts((5,)), **GREEDY)
        telemetry.uninstrument()
        assert len(traced.requests) == count
        checked(batcher)


def test_what_fails_half_way_is_undone(traced):
    with pytest.raises(InvalidConfigError, match="metrics_compat='vlmm' is not known"):
        telemetry.instrument(traced.provider, registry=CollectorRegistry(), metrics_compat="vlmm")
    assert not instrumenting.is_instrumented()
    assert not generation_events.is_watched()
    assert not registry._makers


def test_the_instrumentor_takes_what_that_of_opentelemetry_takes(traced):
    instrumentor = HfpagedInstrumentor()
    assert list(instrumentor.instrumentation_dependencies()) == []
    instrumentor.instrument(
        tracer_provider=traced.provider, registry=CollectorRegistry(), skip_dep_check=True,
        raise_exception_on_conflict=True,
    )  # fmt: skip
    assert instrumentor.is_instrumented_by_opentelemetry
    batcher = batcher_of("llama")
    batcher.generate(prompts((5,)), **GREEDY)
    instrumentor.uninstrument()
    assert not instrumentor.is_instrumented_by_opentelemetry
    assert len(traced.requests) == 1
    checked(batcher)


SCRIPT = """
import sys
from test_batcher_tokens import batcher_of, prompts, tiny_models, torch
torch.set_num_threads(1)
batcher = batcher_of("llama")
batcher.generate(prompts((5,)), max_new_tokens=3, do_sample=False)
"""


def test_a_script_is_traced_without_a_change_by_opentelemetrys_own_command(tmp_path):
    points = importlib.metadata.entry_points(group="opentelemetry_instrumentor")
    assert "hfpaged" in points.names, "hfpaged was installed before it had this entry point: pip install -e . again"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = Path(sys.executable).parent
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [folder / "opentelemetry-instrument", "--traces_exporter", "console", "--metrics_exporter", "none",
         "--logs_exporter", "none", sys.executable, script],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    spans, reader, text = [], json.JSONDecoder(), done.stdout.strip()
    while text:
        span, end = reader.raw_decode(text)
        spans.append(span)
        text = text[end:].lstrip()
    assert [span["name"] for span in spans] == ["queue", "prefill", "decode", "text_completion LlamaForCausalLM"]
    assert {span["parent_id"] for span in spans[:3]} == {spans[3]["context"]["span_id"]}


def test_models_are_left_as_they_are(traced):
    model = unpatched()
    before = type(model).generate
    instrument(traced)
    telemetry.uninstrument()
    assert type(model).generate is before
