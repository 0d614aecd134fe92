"""What a request cost and what it waited for, in a time that stands still between forwards."""

from __future__ import annotations

import pytest
from fake_clock import FakeClock
from test_batcher import of_kind
from test_batcher_tokens import batcher_of, checked, prompts

import hfpaged
from hfpaged.engine import events as ev
from hfpaged.errors import HfpagedError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def clock(monkeypatch):
    return FakeClock(monkeypatch)


def run(clock, lengths, new=6, prompt_ids=None, settings=None, **sizes):
    """(outputs, events, blocks used in each forward, bytes of a block)"""
    seen = []
    batcher = batcher_of(
        "llama", **({"block_size": 4, "num_blocks": 100, "max_step_stretch": None, "hooks": (seen.append,)} | sizes)
    )
    used = clock.tick_in_forwards(batcher)
    made = prompt_ids or prompts(lengths)
    outputs = batcher.generate(
        made, max_new_tokens=new, min_new_tokens=new, **({"do_sample": False} | (settings or {}))
    )
    checked(batcher)
    return outputs, seen, used, batcher.pool.storage.block_bytes


@pytest.mark.parametrize("lengths", [(5,), (3, 9, 14), (4, 8, 16, 17)])
def test_bytes_times_seconds_are_the_blocks_in_use_at_each_forward(clock, lengths):
    outputs, _, used, size = run(clock, lengths, new=11, prefix_sharing=False)
    cost = sum(output.metrics.byte_seconds for output in outputs)
    assert cost == pytest.approx(sum(used) * size)
    assert sum(output.metrics.peak_bytes for output in outputs) >= max(used) * size


def test_a_preempted_request_bears_nothing_while_it_holds_nothing(clock):
    outputs, seen, used, size = run(
        clock, (8, 8, 8), new=20, num_blocks=14, prefix_sharing=False, max_num_batched_tokens=16, max_num_seqs=3
    )
    assert of_kind(seen, ev.Preempted)
    cost = sum(output.metrics.byte_seconds for output in outputs)
    assert cost == pytest.approx(sum(used) * size)


def test_samples_of_one_prompt_bear_their_common_blocks_once(clock):
    (output,), _, used, size = run(clock, (8,), new=8, settings={"n": 3, "seed": 3, "do_sample": True})
    assert output.metrics.byte_seconds == pytest.approx(sum(used) * size)
    assert output.metrics.peak_bytes == max(used) * size
    assert output.metrics.shared_bytes == 0  # nobody else holds them


def test_common_blocks_are_shared_out_among_their_holders(clock):
    common = prompts((32,))[0]
    made = [[*common, 50 + i] for i in range(4)]
    outputs, _, used, size = run(clock, (), new=3, prompt_ids=made)
    cost = sum(output.metrics.byte_seconds for output in outputs)
    assert cost == pytest.approx(sum(used) * size, rel=0.2)  # how many share is looked at now and then only
    assert all(output.metrics.shared_bytes == 8 * size for output in outputs[1:])


def waits_of(outputs):
    for output in outputs:
        assert sum(output.metrics.waits.values()) >= output.metrics.queue_time - 1e-9
    return [{cause: round(seconds, 6) for cause, seconds in output.metrics.waits.items()} for output in outputs]


def test_who_waits_for_a_seat_says_so(clock):
    outputs, *_ = run(clock, (5, 5), new=4, max_num_seqs=1)
    assert waits_of(outputs) == [{}, {"seats": 4.0}]


def test_who_waits_for_the_token_budget_says_so(clock):
    outputs, *_ = run(clock, (16, 16), new=2, max_num_batched_tokens=8, max_num_seqs=2, prefix_sharing=False)
    assert waits_of(outputs) == [{}, {"budget": 2.0}]


def test_who_waits_for_blocks_says_so(clock):
    outputs, *_ = run(clock, (16, 16), new=4, num_blocks=7, prefix_sharing=False)
    assert waits_of(outputs) == [{}, {"blocks": 4.0}]


def test_who_waits_for_a_prefix_says_so(clock):
    common = prompts((16,))[0]
    outputs, seen, *_ = run(
        clock, (), new=4, prompt_ids=[[*common, 7], [*common, 8]], max_num_batched_tokens=12, max_num_seqs=2
    )
    first, second = waits_of(outputs)
    assert first == {}
    assert second["prefix"] == 1.0  # the second half of it; before that the budget was used up
    assert of_kind(seen, ev.PrefixMatched)[1].waited_for == outputs[0].request_id


def test_who_found_no_seat_when_his_prefix_was_there_waited_for_both(clock):
    common = prompts((16,))[0]
    made = [[*common, last] for last in (7, 8, 9)]
    outputs, *_ = run(clock, (), new=4, prompt_ids=made, max_num_batched_tokens=12, max_num_seqs=2)
    first, second, third = waits_of(outputs)
    assert (first, second) == ({}, {"budget": 1.0, "prefix": 1.0})
    assert third == {"budget": 1.0, "prefix": 1.0, "seats": 3.0}


def test_who_comes_in_the_middle_of_a_step_waits_for_its_turn(clock):
    batcher = batcher_of("llama", block_size=4, num_blocks=100, max_step_stretch=None)
    used = clock.tick_in_forwards(batcher)
    late = []

    def bring(event):
        if type(event) is ev.Admitted and not late:
            late.append(batcher.add_request([9, 8, 7], max_new_tokens=2, listener=late.append))

    batcher.hooks.append(bring)
    batcher.generate([[5, 6, 7]], max_new_tokens=4, min_new_tokens=4)
    while batcher.has_work:
        batcher.step()
    assert len(used) == 4
    assert waits_of([late[-1]]) == [{"turn": 1.0}]


def test_a_request_that_is_given_up_in_the_queue_has_waited(clock):
    seen = []
    batcher = batcher_of("llama", block_size=4, num_blocks=100, max_num_seqs=1, hooks=(seen.append,))
    clock.tick_in_forwards(batcher)
    batcher.add_request([5, 6, 7], max_new_tokens=8, min_new_tokens=8)
    waiting = batcher.add_request([5, 6, 9], max_new_tokens=8)
    for _ in range(3):
        batcher.step()
    batcher.abort(waiting)
    (aborted,) = of_kind(seen, ev.Aborted)
    assert aborted.metrics.waits == {"seats": 3.0}
    assert aborted.metrics.byte_seconds == 0
    batcher.close()


def test_waits_of_a_preempted_request_are_told_at_each_admission(clock):
    outputs, seen, *_ = run(
        clock, (8, 8, 8), new=20, num_blocks=14, prefix_sharing=False, max_num_batched_tokens=16, max_num_seqs=3
    )
    for output in outputs:
        told = [e for e in of_kind(seen, ev.Admitted) if e.request_id == output.request_id]
        assert [event.again for event in told] == [False] + [True] * output.metrics.preemptions
        assert sum(event.queue_time for event in told) == pytest.approx(sum(output.metrics.waits.values()))
        assert all(event.queue_time == pytest.approx(sum(event.waits.values())) for event in told)
    assert {cause for output in outputs for cause in output.metrics.waits} == {"blocks", "budget"}


def test_gaps_between_tokens_are_counted_once_for_each_token_but_the_first(clock):
    outputs, seen, *_ = run(clock, (5, 9, 3), new=7)
    gaps = [gap for event in of_kind(seen, ev.StepFinished) for gap in event.token_gaps.items()]
    assert sum(count for _, count in gaps) == sum(len(output.token_ids) - 1 for output in outputs)
    assert {seconds for seconds, _ in gaps} == {1.0}
    assert sum(event.num_sampled for event in of_kind(seen, ev.StepFinished)) == 21


def test_the_gap_of_a_preempted_request_is_as_long_as_it_was_away(clock):
    _, seen, *_ = run(
        clock, (8, 8, 8), new=20, num_blocks=14, prefix_sharing=False, max_num_batched_tokens=16, max_num_seqs=3
    )
    gaps = [gap for event in of_kind(seen, ev.StepFinished) for gap in event.token_gaps]
    away = [event.queue_time for event in of_kind(seen, ev.Admitted) if event.again]
    assert max(gaps) >= max(away) > 1
    assert sum(count for event in of_kind(seen, ev.StepFinished) for count in event.token_gaps.values()) == 3 * 19


def test_chunks_say_what_they_computed_and_when(clock):
    _, seen, *_ = run(clock, (20,), new=2, max_num_batched_tokens=8, max_num_seqs=2)
    chunks = [(chunk.number, chunk.start, chunk.tokens) for chunk in of_kind(seen, ev.Prefilled)]
    assert chunks == [(1, 0, 8), (2, 8, 8), (3, 16, 4)]
    assert all(chunk.time - chunk.began == 1 for chunk in of_kind(seen, ev.Prefilled))


def test_refusals_are_told_with_what_is_known_of_them():
    seen = []
    batcher = batcher_of("llama", block_size=4, num_blocks=10, hooks=(seen.append,))
    with pytest.raises(HfpagedError):
        batcher.add_request([5] * 100, request_id="long", tenant="t")
    with pytest.raises(HfpagedError):
        batcher.add_request("text, and no tokenizer")
    (long, text) = of_kind(seen, ev.Rejected)
    assert (long.request_id, long.tenant, type(long.error)) == ("long", "t", hfpaged.RequestTooLongError)
    assert (text.request_id, text.tenant) == ("", "")
    assert not of_kind(seen, ev.Arrived)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (range(10, 30), range(10, 30), "complete"),
        (range(10, 30), range(50, 70), "never seen"),
        (range(10, 30), [*range(10, 18), 90, *range(19, 30)], "differs"),
        (range(10, 13), range(10, 13), "below block size"),
    ],
)
def test_a_match_says_why_it_ended_and_who_computed_it(first, second, reason):
    seen = []
    batcher = batcher_of("llama", block_size=4, num_blocks=100, hooks=(seen.append,))
    for prompt in (first, second):
        batcher.generate([list(prompt)], max_new_tokens=1)
    match = of_kind(seen, ev.PrefixMatched)[1]
    origins = [event.origin for event in of_kind(seen, ev.Arrived)]
    assert match.reason == reason
    assert match.computed_by == ((origins[0],) if match.hit else ())
    assert batcher.pool.explain(list(second)).reason == "complete" or reason == "below block size"


def test_the_salt_of_another_tenant_is_the_reason():
    seen = []
    batcher = batcher_of("llama", block_size=4, num_blocks=100, hooks=(seen.append,))
    for salt in ("a", "b"):
        batcher.generate([list(range(10, 30))], max_new_tokens=1, salt=salt)
    assert [event.reason for event in of_kind(seen, ev.PrefixMatched)] == ["never seen", "other key"]
