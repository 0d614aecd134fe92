"""Requests of a running engine that one coroutine awaits together, and how outputs come to its event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from test_batcher_tokens import batcher_of, checked, prompts

from hfpaged import InvalidConfigError, QueueFullError
from hfpaged.engine.arrivals import Arrivals, Doorbell
from hfpaged.engine.call import Submission
from hfpaged.errors import RequestTooLongError

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def batcher():
    batcher = batcher_of("llama", block_size=4, num_blocks=100, max_num_batched_tokens=32, max_num_seqs=4)
    yield batcher
    checked(batcher)


def submissions(given, **settings):
    return lambda: [Submission(prompt, GREEDY | settings) for prompt in given]


def in_engine(batcher, coroutine_of):
    async def main():
        async with batcher.running() as engine:
            return await coroutine_of(engine)

    return asyncio.run(main())


def test_requests_of_one_call_end_together_in_their_order(batcher):
    given = prompts((9, 3, 17))
    expected = [output.token_ids for output in batcher.generate(given, **GREEDY)]

    async def run(engine):
        call = await engine.begin(submissions(given))
        assert len(set(call.request_ids)) == 3
        return await call.last_outputs()

    assert [output.token_ids for output in in_engine(batcher, run)] == expected


def test_events_of_a_call_make_up_all_its_tokens(batcher):
    given = prompts((9, 3))
    expected = [output.token_ids for output in batcher.generate(given, **GREEDY)]

    async def run(engine):
        call = await engine.begin(submissions(given))
        tokens = {0: [], 1: []}
        async for arrival in call.arrivals():
            for event in arrival.events:
                tokens[arrival.index] += event.token_ids
        return tokens

    assert in_engine(batcher, run) == dict(enumerate(expected))


def test_who_reads_late_gets_all_at_once(batcher):
    given = prompts((9,))
    expected = batcher.generate(given, **GREEDY)[0].token_ids

    async def run(engine):
        call = await engine.begin(submissions(given))
        while batcher.loop.requests:
            await asyncio.sleep(0.01)
        return [event.token_ids async for arrival in call.arrivals() for event in arrival.events]

    assert in_engine(batcher, run) == [expected]


def test_all_requests_of_a_call_are_added_or_none(batcher):
    good, long = prompts((9,))[0], [3] * 500

    async def run(engine):
        with pytest.raises(RequestTooLongError):
            await engine.begin(submissions([good, long]))
        while batcher.has_work:
            await asyncio.sleep(0.01)

    in_engine(batcher, run)
    numbers = batcher.tally.read()[0].numbers
    assert numbers["hfpaged_requests_received_total",] == 2
    assert numbers["hfpaged_requests_aborted_total",] == 1
    assert numbers["hfpaged_requests_rejected_total", "too_long"] == 1


def test_closing_a_call_aborts_what_has_not_ended_and_nothing_else(batcher):
    short, endless = prompts((9, 5))

    async def run(engine):
        call = await engine.begin(
            lambda: [Submission(short, GREEDY | {"max_new_tokens": 1}), Submission(endless, {"max_new_tokens": 200})]
        )
        async for arrival in call.arrivals():
            if arrival.output.finished:
                break
        call.close()
        call.close()
        return await engine.generate(short, **GREEDY)

    assert in_engine(batcher, run).finish_reason == "length"
    numbers = batcher.tally.read()[0].numbers
    assert numbers["hfpaged_requests_aborted_total",] == 1
    assert numbers["hfpaged_requests_finished_total", "length"] == 2


def test_a_call_that_is_cancelled_while_it_is_prepared_leaves_nothing(batcher):
    started, go = threading.Event(), threading.Event()

    def prepare():
        yield Submission(prompts((9,))[0], {"max_new_tokens": 200})
        started.set()
        go.wait(10)
        yield Submission(prompts((9,))[0], {"max_new_tokens": 200})  # too late for anybody

    async def run(engine):
        beginning = asyncio.ensure_future(engine.begin(prepare))
        await asyncio.to_thread(started.wait, 10)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        go.set()
        while not batcher.tally.read()[0].numbers["hfpaged_requests_aborted_total",]:
            await asyncio.sleep(0.01)

    in_engine(batcher, run)
    assert batcher.tally.read()[0].numbers["hfpaged_requests_received_total",] == 1


def test_what_prepare_raises_is_raised(batcher):
    async def run(engine):
        with pytest.raises(ZeroDivisionError):
            await engine.begin(lambda: [Submission([1 // 0])])
        with pytest.raises(InvalidConfigError):
            await engine.begin(submissions([[]]))

    in_engine(batcher, run)


def test_more_requests_than_may_run_and_wait_are_refused():
    batcher = batcher_of("llama", block_size=4, num_blocks=100, max_num_seqs=2, max_num_queued_requests=1)
    for prompt in prompts((9, 3, 5)):
        batcher.add_request(prompt, **GREEDY)
    with pytest.raises(QueueFullError, match=r"3 requests are in flight, and 2 may run .* and 1 wait"):
        batcher.add_request(prompts((4,))[0], **GREEDY)
    assert batcher.tally.read()[0].numbers["hfpaged_requests_rejected_total", "queue_full"] == 1
    while batcher.has_work:
        batcher.step()
    assert batcher.generate(prompts((4,)), **GREEDY)[0].finish_reason == "length"
    checked(batcher)


def test_a_loop_is_called_once_for_all_that_comes_before_it_answers():
    async def main():
        calls = []
        loop = SimpleNamespace(call_soon_threadsafe=calls.append)
        arrivals = [Arrivals(Doorbell(loop))]
        doorbell = arrivals[0]._doorbell
        arrivals += [Arrivals(doorbell), Arrivals(doorbell)]
        for number in range(3):
            for box in arrivals:
                box.put(0, number)
        assert len(calls) == 1
        calls[0]()
        assert [await box.take() for box in arrivals] == [{0: 2}] * 3  # the latest
        arrivals[1].put(7, "again")
        assert len(calls) == 2

    asyncio.run(main())


def test_a_loop_that_is_closed_is_rung_in_vain():
    loop = asyncio.new_event_loop()
    doorbell = Doorbell(loop)
    loop.close()
    for _ in range(3):
        doorbell.ring(lambda: pytest.fail("nobody is there"))
    assert doorbell._rung == []


def test_nobody_waits_for_a_thread_that_a_hook_has_ended(batcher, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def ends(event):
        if type(event).__name__ == "Admitted":
            raise SystemExit

    batcher.hooks.append(ends)

    async def run(engine):
        output = await asyncio.wait_for(engine.generate(prompts((9,))[0], max_new_tokens=200), 30)
        while engine.is_alive:  # it tells first, then it goes
            await asyncio.sleep(0.01)
        return output

    output = in_engine(batcher, run)
    assert output.finish_reason == "error"
    assert "has ended" in str(output.error)
