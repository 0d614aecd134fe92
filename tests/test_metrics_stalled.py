"""Requests that nobody computes are seen: before any step has told of them, and behind an engine that goes on."""

from __future__ import annotations

import gc

import pytest
from metrics_figures import Figures
from stub_batcher import StubBatcher

from hfpaged.engine import tally
from hfpaged.telemetry import families, families_of

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = "LlamaForCausalLM"


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        time = 4e9  # later than all that other tests have left

    monkeypatch.setattr(tally, "now", lambda: Clock.time)
    monkeypatch.setattr("hfpaged.engine.events.now", lambda: Clock.time)
    return Clock


def batcher_with(*prompts, **more):
    batcher = StubBatcher(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=40, **more)
    for prompt in prompts:
        batcher.add_request(prompt, max_new_tokens=20, do_sample=False)
    return batcher


def test_requests_that_no_step_has_told_of_wait():
    batcher = batcher_with([5, 6, 7], [8, 9])
    figures = Figures(families_of(batcher))
    assert figures("hfpaged_requests_received_total") == figures("hfpaged_requests_waiting") == 2
    batcher.step()
    figures = Figures(families_of(batcher))
    assert figures("hfpaged_requests_received_total") == figures("hfpaged_requests_running") == 2


def test_those_of_a_batcher_that_is_dropped_before_its_first_step_are_given_up():
    def numbers():
        figures = Figures(families(), MODEL)
        parts = ("received_total", "aborted_total", "waiting", "running", "duration_seconds_count")
        return [figures(f"hfpaged_request{'' if 'duration' in part else 's'}_{part}") for part in parts]

    batcher = batcher_with()
    gc.collect()
    before = numbers()
    batcher.add_request([5, 6, 7], max_new_tokens=3)
    assert numbers() == [before[0] + 1, before[1], before[2] + 1, *before[3:]]
    del batcher
    gc.collect()
    assert numbers() == [before[0] + 1, before[1] + 1, *before[2:4], before[4] + 1]


def test_time_without_a_step_counts_while_there_are_requests(clock):
    batcher = batcher_with()
    assert batcher.tally.stalled_seconds() == 0.0
    batcher.add_request([5, 6, 7], max_new_tokens=3, do_sample=False)
    clock.time += 40
    batcher.add_request([5, 6, 8], max_new_tokens=3, do_sample=False)
    assert batcher.tally.stalled_seconds() == 40.0  # since the first one came, and not since there is an engine
    batcher.step()
    assert batcher.tally.stalled_seconds() == 0.0
    clock.time += 7
    assert batcher.tally.stalled_seconds() == 7.0
    while batcher.has_work:
        batcher.step()
    clock.time += 3600  # an hour without work
    assert batcher.tally.stalled_seconds() == 0.0
    batcher.add_request([5], max_new_tokens=1, do_sample=False)
    assert batcher.tally.stalled_seconds() == 0.0


def test_an_engine_that_goes_on_does_not_hide_one_of_its_name_that_stands(clock):
    gc.collect()
    stuck, good = batcher_with([5, 6, 7]), batcher_with([8, 9])
    stuck.step()
    clock.time += 300
    good.step()
    figures = Figures(families(), MODEL)
    assert figures("hfpaged_last_step_timestamp_seconds") == clock.time
    assert figures("hfpaged_stalled_seconds") == 300.0
    del stuck
    gc.collect()
    assert Figures(families(), MODEL)("hfpaged_stalled_seconds") == 0.0
    good.close()
