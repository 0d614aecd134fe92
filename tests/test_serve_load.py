"""Random load on a server in a process of its own: whatever clients do, it answers in its own terms, nothing is left
behind, and its accounts agree. HFPAGED_SOAK_SECONDS says for how long; `make soak` takes 30 minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from load_http import exchange, request_bytes
from metrics_figures import Figures
from serve_load import Load, Sample, slope
from serve_load_kinds import GREEDY, GREEDY_TOKENS, KINDS, MARK, attempt
from serve_load_worker import SIZES, make_model

from hfpaged import ContinuousBatcher
from hfpaged.bench.batch_workload import endless

pytestmark = pytest.mark.usefixtures("one_thread")

SECONDS = float(os.environ.get("HFPAGED_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("HFPAGED_SOAK_SEED", "0"))
PATIENCE = 120.0  # seconds; kernels may have to be compiled first
# The second half of the load may add so many bytes to the resident memory, or so many for each of its requests where
# that is more: a leak of 1 KB for each is found in 30 minutes, one of a few KB in the short form.
MOST_BYTES, MOST_BYTES_EACH = 12 * 2**20, 512
WORKER = Path(__file__).with_name("serve_load_worker.py")


@dataclass(frozen=True)
class Outcome:
    """What was seen from outside, what the server said when all was quiet, and what it left in the end."""

    load: Load
    metrics: str
    left: dict[str, int]
    log: str
    code: int


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    log = tmp_path_factory.mktemp("load") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = os.pathsep.join([str(WORKER.parent), *sys.path])
    with log.open("w") as errors, subprocess.Popen(
        [sys.executable, str(WORKER), str(port)], stdout=subprocess.PIPE, stderr=errors, text=True,
        env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            _wait(lambda: process.poll() is not None or _status(port, "/health") == 200)
            load = Load(port, process.pid, SEED)
            load.run(SECONDS)
            metrics = _quiet_metrics(port)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return Outcome(load, metrics, json.loads(out.splitlines()[-1]), log.read_text(), process.returncode)


def _wait(holds):
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"nothing came of it in {PATIENCE} s"
        time.sleep(0.1)


def _get(port, path):
    return asyncio.run(exchange(port, request_bytes("GET", path)))


def _status(port, path):
    try:
        return _get(port, path).status
    except OSError:
        return None


def _quiet_metrics(port):
    """A scrape when the requests of all who have gone are gone too."""

    def is_quiet():
        figures = Figures(_get(port, "/metrics").body.decode())
        return not figures("hfpaged_requests_running") and not figures("hfpaged_requests_waiting")

    _wait(is_quiet)
    return _get(port, "/metrics").body.decode()


def test_every_kind_of_request_was_made(outcome):
    assert set(outcome.load.seen) == set(KINDS)
    statuses = {status for seen in outcome.load.seen.values() for status in seen}
    assert statuses >= {200, 400, 401, 404, 405, 413, 429, None}


def test_each_answer_is_one_that_is_right_for_its_request(outcome):
    assert "\n".join(outcome.load.faults) == ""


def test_no_answer_is_a_5xx_but_503(outcome):
    assert [
        (kind, status) for kind, seen in outcome.load.seen.items() for status in seen
        if status is not None and 500 <= status != 503
    ] == []  # fmt: skip


def test_nothing_is_left_of_any_request_and_the_pool_is_whole(outcome):
    assert outcome.left == {"requests": 0, "with_blocks": 0, "blocks": 0}
    assert outcome.code == 0


def test_greedy_answers_are_those_of_a_batcher_in_process(outcome):
    model, tokenizer = make_model()
    with endless(model), ContinuousBatcher(model, tokenizer, **SIZES) as batcher:
        outputs = batcher.generate(GREEDY, max_new_tokens=GREEDY_TOKENS, do_sample=False)
    expected = {number: {output.text} for number, output in enumerate(outputs)}
    assert outcome.load.answers.items() <= expected.items()
    assert len(outcome.load.answers) > 3


def test_counters_obey_conservation_and_histograms_count_what_they_count(outcome):
    figures = Figures(outcome.metrics)
    requests = {part: figures(f"hfpaged_requests_{part}_total") for part in ("received", "finished", "aborted")}
    rejected = sum(figures.by("hfpaged_requests_rejected_total", "reason").values())
    ended = requests["finished"] + requests["aborted"]
    assert requests["received"] == ended + rejected
    for name in ("duration_seconds", "queue_seconds", "prompt_tokens", "output_tokens"):
        assert figures(f"hfpaged_request_{name}_count") == ended
    assert figures("hfpaged_request_output_tokens_sum") == figures("hfpaged_generated_tokens_total")
    assert figures("hfpaged_step_sequences_count") == figures("hfpaged_step_duration_seconds_count")
    assert min(rejected, requests["finished"], requests["aborted"], figures("hfpaged_preemptions_total")) > 0


def test_the_log_holds_no_text_of_a_prompt(outcome):
    assert "/v1/completions" in outcome.log
    assert MARK not in outcome.log


def test_resident_memory_files_and_threads_stay_flat_after_warm_up(outcome):
    second = outcome.load.samples[len(outcome.load.samples) // 2 :]
    requests = second[-1].requests - second[0].requests
    growth = requests * slope(second, lambda sample: sample.resident_bytes)
    assert growth < max(MOST_BYTES, requests * MOST_BYTES_EACH), f"{growth / 2**20:.1f} MiB in {requests} requests"
    assert requests * slope(second, lambda sample: sample.open_files) < 10
    assert requests * slope(second, lambda sample: sample.threads) < 5


def test_a_leak_shows_as_a_slope():
    leaking = [Sample(n, 10**9 + 1000 * n + (n % 7) * 50_000, 20, 30) for n in range(0, 100_000, 50)]
    assert slope(leaking, lambda sample: sample.resident_bytes) == pytest.approx(1000, rel=0.01)
    assert slope(leaking, lambda sample: sample.threads) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_sends_the_same(kind):
    for seed in range(5):
        one, same = (attempt(kind, random.Random(seed)) for _ in range(2))
        assert (one.request, one.manner, one.allowed) == (same.request, same.manner, same.allowed)
