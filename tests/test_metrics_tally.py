"""What one batcher counts, event by event."""

from __future__ import annotations

import random
import threading
from bisect import bisect_left

import pytest
import stub_batcher

from hfpaged import errors
from hfpaged.engine import buckets, events, tally_keys
from hfpaged.engine.outputs import RequestMetrics
from hfpaged.engine.sums import Histogram, Sums
from hfpaged.engine.tally import Tally
from hfpaged.telemetry.catalog import BY_NAME, METRICS

pytestmark = pytest.mark.usefixtures("one_thread")


def arrived(name, prompt_tokens=5):
    return events.Arrived(
        request_id=name, prompt_tokens=prompt_tokens, priority=0, params=None, origin=None, context=None
    )  # fmt: skip


def ended(kind, name, times=(10.0, None, None, 12.0), tokens=(), prompt_tokens=5, waits=None, **more):
    metrics = RequestMetrics(*times, waits=waits or {}, byte_seconds=100.0)
    return kind(
        request_id=name, prompt_tokens=prompt_tokens, output_tokens=sum(tokens), sequence_tokens=tokens,
        metrics=metrics, **more,
    )  # fmt: skip


def told(*happened):
    tally = Tally("model")
    for event in happened:
        tally(event)
    return tally


def histogram(tally, *key):
    return tally.sums.histograms[key]


@pytest.mark.parametrize("bounds", [buckets.DURATION, buckets.LENGTH, buckets.FIRST_TOKEN])
def test_a_histogram_counts_a_value_in_the_first_bucket_whose_bound_it_does_not_exceed(bounds):
    rng = random.Random(0)
    values = [*bounds, *(bound + 1e-9 for bound in bounds), 0.0, 10 * bounds[-1]]
    values += [rng.expovariate(1 / bounds[len(bounds) // 2]) for _ in range(500)]
    found = Histogram(bounds)
    for value in values:
        found.observe(value)
    for number, bound in enumerate(bounds):
        assert sum(found.counts[: number + 1]) == sum(value <= bound for value in values)
    assert found.count == len(values)
    assert found.sum == pytest.approx(sum(values))


def test_observing_many_equal_values_at_once_is_observing_each():
    at_once, each = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    at_once.observe(1.5, 7)
    for _ in range(7):
        each.observe(1.5)
    assert (at_once.counts, at_once.sum) == (each.counts, each.sum)


def test_the_buckets_are_those_of_the_conventions():
    doubling = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
    assert tuple(round(bound, 9) for bound in buckets.DURATION) == doubling
    assert buckets.FIRST_TOKEN == (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    assert buckets.PER_TOKEN == (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def test_all_histograms_of_the_catalog_are_kept_with_its_buckets():
    kept = {key[0]: found.bounds for key, found in Tally().sums.histograms.items() if key[0] in BY_NAME}
    assert kept == {
        metric.name: metric.buckets
        for metric in METRICS
        if metric.kind == "histogram" and not metric.name.startswith(("hfpaged_generate", "hfpaged_shadow"))
    }


def test_sums_add_up_and_leave_what_was_added_alone():
    first, second = Sums(), Sums()
    first.count(("a", "x"), 2)
    second.count(("a", "x"), 3)
    second.count(("b",))
    second.histogram(("h",), (1.0,)).observe(0.5)
    first.add(second)
    first.add(second)
    assert first.numbers == {("a", "x"): 8, ("b",): 2}
    assert (first.histograms[("h",)].counts, first.histograms[("h",)].sum) == ([2, 0], 1.0)
    assert second.numbers == {("a", "x"): 3, ("b",): 1}
    assert second.histograms[("h",)].counts == [1, 0]


def test_a_new_tally_names_all_its_counters_with_0():
    numbers = Tally().sums.numbers
    assert set(numbers.values()) == {0}
    pools = ("kv_evicted", "kv_events", "kv_swap", "kv_restore", "prefix_queried", "prefix_hit", "prefix_hash",
             "prefix_store", "generate_", "dense", "shadow_")  # fmt: skip
    wanted = {
        m.name for m in METRICS if m.kind == "counter" and not m.name.startswith(tuple(f"hfpaged_{p}" for p in pools))
    }
    assert {key[0] for key in numbers if key[0] in BY_NAME} == wanted


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.RequestTooLongError("x"), "too_long"),
        (errors.InvalidConfigError("x"), "invalid"),
        (errors.BatcherClosedError("x"), "closed"),
        (errors.UnsupportedModelError("x"), "unsupported_model"),
        (TypeError("x"), "type"),
        (KeyError("x"), "key"),
        (type("Error", (Exception,), {})("x"), "error"),
    ],
)
def test_a_refusal_is_received_and_rejected_with_its_reason_in_a_word(error, reason):
    tally = told(events.Rejected(request_id="", error=error))
    assert tally.sums.numbers[tally_keys.RECEIVED] == 1
    assert tally.sums.numbers[tally_keys.REJECTED, reason] == 1
    assert sum(n for key, n in tally.sums.numbers.items() if key[0] == tally_keys.REJECTED) == 1


@pytest.mark.parametrize("kind", ["finished", "failed", "aborted"])
def test_whoever_ends_is_in_every_series_of_requests(kind):
    times = (10.0, 10.5, 11.0, 13.0)
    tokens = (3, 5)
    event = {
        "finished": lambda: ended(events.Finished, "a", times, tokens, finish_reason="length"),
        "failed": lambda: ended(events.Failed, "a", times, tokens, error=ValueError("x")),
        "aborted": lambda: ended(events.Aborted, "a", times, tokens),
    }[kind]()
    tally = told(arrived("a"), event)
    sums = {key[0]: (h.count, h.sum) for key, h in tally.sums.histograms.items() if h.count}
    assert sums["hfpaged_request_duration_seconds"] == (1, 3.0)
    assert sums["hfpaged_request_queue_seconds"] == (1, 0.5)
    assert sums["hfpaged_request_prompt_tokens"] == (1, 5)
    assert sums["hfpaged_request_output_tokens"] == (1, 8)
    assert sums["hfpaged_sequence_tokens"] == (2, 5 + 3 + 5 + 5)
    assert sums["hfpaged_time_per_output_token_seconds"] == (1, 2.0 / 4)  # its longest sequence has 4 behind the first
    assert tally.sums.numbers[tally_keys.BYTE_SECONDS] == 100.0
    assert tally.read()[1] == {}


def test_one_that_ends_while_it_waits_has_queued_until_its_end_and_had_no_token():
    tally = told(arrived("a"), ended(events.Aborted, "a", waits={"blocks": 2.0}))
    assert histogram(tally, "hfpaged_request_queue_seconds").sum == 2.0
    assert histogram(tally, "hfpaged_time_per_output_token_seconds").count == 0
    assert tally.sums.numbers[tally_keys.WAIT_SECONDS, "blocks"] == 2.0


def test_each_second_of_waiting_is_counted_once_whenever_it_is_told():
    tally = told(
        arrived("a"),
        events.Admitted(request_id="a", queue_time=3.0, again=False, waits={"blocks": 1.0, "turn": 2.0}),
        events.Preempted(request_id="a", lost=4, output_tokens=1),
    )
    assert tally.read()[1]["a"].was_preempted
    tally(events.Admitted(request_id="a", queue_time=0.5, again=True, waits={"blocks": 0.5}))
    tally(ended(events.Aborted, "a", waits={"blocks": 1.75, "turn": 2.0, "seats": 1.0}))
    waited = {key[1]: n for key, n in tally.sums.numbers.items() if key[0] == tally_keys.WAIT_SECONDS}
    assert waited == {"blocks": 1.75, "turn": 2.0, "seats": 1.0, "budget": 0, "prefix": 0}
    assert tally.sums.numbers[tally_keys.PROMPT_TOKENS] == 5  # once, though it was admitted twice


def step(**changes):
    usual = {
        "number": 1, "num_sequences": 3, "num_tokens": 20, "num_prefill_tokens": 18, "num_sampled": 2,
        "num_waiting": 0, "num_running": 3, "preemptions": 0, "seconds": 1.0, "forward_seconds": 0.6,
        "sampling_seconds": 0.1, "blocks_used": 3, "blocks_total": 9, "token_gaps": {0.02: 2, 0.3: 1},
    }  # fmt: skip
    return events.StepFinished(**(usual | changes))


def test_a_step_is_split_by_phase_and_by_what_its_seconds_went_into():
    tally = told(step(), step(num_tokens=3, num_prefill_tokens=0, num_sampled=3, token_gaps={}))
    numbers = tally.sums.numbers
    assert (numbers[tally_keys.COMPUTED_TOKENS, "prefill"], numbers[tally_keys.COMPUTED_TOKENS, "decode"]) == (18, 5)
    assert numbers[tally_keys.GENERATED_TOKENS] == 5
    parts = [numbers[tally_keys.STEP_SECONDS, part] for part in ("forward", "sampling", "scheduling")]
    assert parts == pytest.approx([1.2, 0.2, 0.6])
    assert histogram(tally, "hfpaged_step_duration_seconds", "prefill").count == 1
    assert histogram(tally, "hfpaged_step_duration_seconds", "decode").count == 1
    tokens = {phase: histogram(tally, "hfpaged_step_tokens", phase) for phase in ("prefill", "decode")}
    assert [(h.count, h.sum) for h in tokens.values()] == [(1, 18), (2, 5)]
    gaps = histogram(tally, "hfpaged_inter_token_latency_seconds")
    assert (gaps.count, gaps.counts[bisect_left(gaps.bounds, 0.02)], gaps.sum) == (3, 2, pytest.approx(0.34))


def test_a_step_that_computed_nothing_is_no_step_of_either_phase():
    tally = told(step(num_sequences=0, num_tokens=0, num_prefill_tokens=0, num_sampled=0, token_gaps={}))
    assert all(h.count == 0 for h in tally.sums.histograms.values())
    assert tally.last_step_time is not None


def test_reasons_of_misses_are_words_with_underscores():
    reasons = ("below block size", "never seen", "complete", "left window")
    matches = [events.PrefixMatched(request_id="a", hit=0, queried=9, reason=reason) for reason in reasons]
    tally = told(arrived("a"), *matches)
    found = {key[1] for key, n in tally.sums.numbers.items() if key[0] == tally_keys.LOOKUPS and n}
    assert found == {"below_block_size", "never_seen", "complete", "left_window"}


def test_an_event_that_nothing_is_counted_of_changes_nothing():
    tally = told(events.StepStuck(number=1, seconds=2.0))
    assert set(tally.sums.numbers.values()) == {0}


def test_refusals_of_many_threads_are_all_counted():
    tally = Tally()
    event = events.Rejected(request_id="", error=errors.RequestTooLongError("x"))

    def refuse():
        for _ in range(2000):
            tally(event)

    threads = [threading.Thread(target=refuse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.sums.numbers[tally_keys.RECEIVED] == tally.sums.numbers[tally_keys.REJECTED, "too_long"] == 8000


def test_a_finalizer_that_refuses_or_aborts_while_the_tally_is_read_does_not_wait_for_ever():
    tally = told(arrived("a"))
    done = []

    def read_and_count():
        with tally._lock:  # as in the middle of any count
            tally(ended(events.Aborted, "a"))
        done.append(tally.sums.numbers[tally_keys.ABORTED])

    thread = threading.Thread(target=read_and_count, daemon=True)
    thread.start()
    thread.join(10)
    assert done == [1]


def test_one_whose_arrival_was_never_told_does_no_harm():
    tally = told(
        events.Admitted(request_id="a", queue_time=0.0, again=False, waits={}),
        ended(events.Finished, "a", finish_reason="stop"),
    )
    assert tally.read()[1] == {}


def test_each_batcher_has_a_tally_and_it_is_told_first():
    seen = []
    batcher = stub_batcher.StubBatcher(
        num_blocks=20, block_size=4, hooks=(lambda event: seen.append(batcher.tally.read()),)
    )
    assert batcher.hooks[0] is batcher.tally
    batcher.generate([[5, 6, 7]], max_new_tokens=1)
    assert seen[0][0].numbers[tally_keys.RECEIVED] == 1  # counted when others are told
    batcher.close()
