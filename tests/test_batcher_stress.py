"""Many requests, many threads, interrupts and other holders of the pool: nothing is lost, nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_models
import torch
from stub_batcher import StubBatcher, going_on

from hfpaged import PagedCache
from hfpaged.engine import events as ev
from hfpaged.engine import loop
from hfpaged.engine.results import output_of
from hfpaged.engine.scheduler import Scheduler
from hfpaged.errors import BatcherClosedError, CallbackError, NestedStepError, OutOfBlocksError, RequestTooLongError

GREEDY = {"do_sample": False}
SMALL = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def batcher():
    batcher = StubBatcher(**SMALL)
    yield batcher
    batcher.check_empty()
    batcher.close()


def some_prompts(count, seed=0, most=20):
    """Some with common prefixes, some the same as others."""
    rng = random.Random(seed)
    starts = [[10 + start] * rng.randint(1, 12) for start in range(4)]
    return [rng.choice(starts) + [rng.randint(3, 9) for _ in range(rng.randint(1, most - 12))] for _ in range(count)]


def run(batcher):
    """All outputs that finished, by request."""
    finals = {}
    while batcher.has_work:
        for output in batcher.step():
            if output.finished:
                assert output.request_id not in finals
                finals[output.request_id] = output
    return finals


def in_threads(count, task):
    """What `task` gives for 0 .. count - 1, each in a thread of its own; raises what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=60) for future in [pool.submit(task, number) for number in range(count)]]


def test_two_thousand_requests_go_through_a_pool_of_64_blocks(batcher):
    given = some_prompts(2000)
    outputs = batcher.generate(given, max_new_tokens=6, **GREEDY)
    assert [output.token_ids for output in outputs] == [going_on(prompt, 6) for prompt in given]
    assert len(batcher.finals) == 2000


def test_a_thousand_aborts_before_in_and_after_their_steps_leak_nothing(batcher):
    rng, aborted, names = random.Random(1), set(), []
    for prompt in some_prompts(1500, seed=2):
        kind = rng.choice(({}, {}, {"do_sample": True, "n": 2}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}))
        names.append(batcher.add_request(prompt, max_new_tokens=8, **GREEDY | kind))
        for _ in range(rng.choice((0, 0, 1, 2))):
            batcher.step()
        for name in rng.choices(names[-9:], k=rng.choice((1, 2, 3))):
            was_there = name not in batcher.finals
            assert batcher.abort(name) == was_there
            aborted |= {name} if was_there else set()
            if not len(names) % 50:
                batcher.pool.check_integrity()
    assert len(aborted) >= 1000
    run(batcher)
    for name in names:
        (event,) = batcher.finals[name]
        assert type(event) is (ev.Aborted if name in aborted else ev.Finished)


def test_eight_threads_add_and_abort_while_one_steps(batcher):
    collected, names, done = {}, [], threading.Event()

    def add(number):
        rng = random.Random(number)
        for prompt in some_prompts(60, seed=number):
            kept = []
            name = batcher.add_request(prompt, max_new_tokens=5, tenant=str(number % 3), listener=kept.append, **GREEDY)
            names.append((name, prompt, kept, rng.random() < 0.2 and batcher.abort(name)))

    def step():
        while not done.is_set() or batcher.has_work:
            collected.update({output.request_id: output for output in batcher.step() if output.finished})

    stepper = threading.Thread(target=step)
    stepper.start()
    in_threads(8, add)
    done.set()
    stepper.join(60)
    assert len(collected) == len(names) == len({name for name, *_ in names}) == 480
    for name, prompt, kept, was_aborted in names:
        assert kept[-1] is collected[name] or kept[-1].finished
        assert [output.finished for output in kept].count(True) == 1
        if was_aborted:
            assert collected[name].finish_reason == "abort"
        else:
            assert collected[name].token_ids == going_on(prompt, 5)


def test_threads_that_generate_and_stream_at_once_share_the_steps(batcher):
    def work(number):
        given = some_prompts(12, seed=number)
        if number % 2:
            return [out.token_ids for out in batcher.generate(given, max_new_tokens=7, **GREEDY)], given
        streams = [batcher.stream(prompt, max_new_tokens=7, **GREEDY) for prompt in given]
        return [[token for piece in stream for token in piece.token_ids] for stream in streams], given

    for found, given in in_threads(8, work):
        assert found == [going_on(prompt, 7) for prompt in given]
    assert max(sequences for sequences, _ in batcher.forwards) > 8


def test_threads_add_to_an_engine_that_runs(batcher):
    def work(number):
        given = some_prompts(20, seed=number)
        return [out.token_ids for out in batcher.generate(given, max_new_tokens=5, **GREEDY)], given

    with batcher.running():
        for found, given in in_threads(6, work):
            assert found == [going_on(prompt, 5) for prompt in given]


@pytest.mark.parametrize("drain", [True, False])
def test_closing_in_the_middle_ends_all_requests_of_all_threads(drain):
    batcher = StubBatcher(**SMALL)
    started = threading.Barrier(7)

    def work(number):
        ends = []
        started.wait()
        try:
            while True:
                ends += [
                    out.finish_reason for out in batcher.generate(some_prompts(6, number), max_new_tokens=9, **GREEDY)
                ]
        except BatcherClosedError:
            return ends

    with ThreadPoolExecutor(6) as pool:
        tasks = [pool.submit(work, number) for number in range(6)]
        started.wait()
        time.sleep(0.1)
        batcher.close(drain=drain)
        ends = [reason for task in tasks for reason in task.result(timeout=60)]
    assert set(ends) <= ({"length"} if drain else {"length", "abort"})
    run(batcher)  # records of those that were added while it closed
    batcher.check_empty()


def test_least_computed_first_computes_less_again_than_last_come_first_out():
    """Long prompts among short ones on a small pool."""
    rng = random.Random(2)
    load = [
        ([3 + rng.randint(0, 90) for _ in range(rng.choice((4, 60, 100)))], rng.choice((8, 30, 60))) for _ in range(30)
    ]
    least = sum(len(prompt) + new - 1 for prompt, new in load)
    again = {}
    for policy in ("least_computed", "last_come"):
        batcher = StubBatcher(**SMALL | {"num_blocks": 40, "preemption": policy, "prefix_sharing": False})
        for prompt, new in load:
            batcher.add_request(prompt, max_new_tokens=new, **GREEDY)
        finals = run(batcher).values()
        assert sum(output.metrics.preemptions for output in finals) > 5
        again[policy] = sum(output.metrics.computed_tokens for output in finals) - least
        batcher.close()
    assert 0 < again["least_computed"] < 0.85 * again["last_come"]


def test_caches_that_come_and_go_on_the_same_pool_leave_the_batcher_whole():
    """A real model: both sides give what they give alone."""
    from test_batcher_tokens import alone, batcher_of, checked, prompts

    import hfpaged

    model = tiny_models.shared("llama")
    hfpaged.unpatch(model)
    given = prompts((9, 20, 5, 14, 30, 3), seed=4)
    expected = [alone(model, prompt)[0] for prompt in given]
    batcher = batcher_of("llama", block_size=4, num_blocks=48, max_num_seqs=6, max_num_batched_tokens=24)
    names = [batcher.add_request(prompt, max_new_tokens=12, **GREEDY) for prompt in given]
    ids, caches, outputs = torch.tensor([given[1]]), [], {}
    for turn in range(200):
        if turn % 3 == 0 and batcher.pool.num_free > 16:
            caches.append(PagedCache(model, pool=batcher.pool))
            out = model.generate(ids, past_key_values=caches[-1], max_new_tokens=12, **GREEDY)
            assert out[0, ids.shape[1] :].tolist() == expected[1]
        elif caches:
            caches.pop(0).free()
        outputs |= {output.request_id: output for output in batcher.step() if output.finished}
        batcher.pool.check_integrity()
    for cache in caches:
        cache.free()
    assert len(outputs) == len(names)
    for name, tokens in zip(names, expected, strict=True):
        assert outputs[name].token_ids == tokens
    checked(batcher)


def test_ctrl_c_in_the_forward_of_generate_aborts_its_requests_and_no_other(batcher):
    other = batcher.add_request([5, 6, 7], max_new_tokens=20, **GREEDY)

    def interrupt():
        if len(batcher.forwards) == 3:
            raise KeyboardInterrupt

    batcher.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        batcher.generate(some_prompts(5), max_new_tokens=20, **GREEDY)
    batcher.before_forward = lambda: None
    batcher.pool.check_integrity()
    finals = run(batcher)
    assert finals[other].token_ids == going_on([5, 6, 7], 20)
    assert sorted(output.finish_reason for output in finals.values()) == ["abort"] * 5 + ["length"]


EVENTS = [
    ev.Arrived,
    ev.Admitted,
    ev.PrefixMatched,
    ev.Preempted,
    ev.FirstToken,
    ev.StepFinished,
    ev.Finished,
    ev.Aborted,
]


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("at", [1, 4])
def test_ctrl_c_in_a_hook_loses_no_request_and_no_record(kind, at):
    batcher = StubBatcher(**SMALL | {"num_blocks": 30})
    seen, told, after = [], [], []

    def interrupt(event):
        seen.append(event)
        if type(event) is kind and sum(type(each) is kind for each in seen) == at:
            raise KeyboardInterrupt

    batcher.hooks.append(interrupt)
    batcher.hooks.append(after.append)
    given = some_prompts(12, seed=3)
    names = [batcher.add_request(p, max_new_tokens=20, listener=told.append, **GREEDY) for p in given]
    finals, interrupts = {}, 0
    for number in range(1000):
        if number in (3, 5, 7, 9):
            batcher.abort(names[number])
        try:
            for output in batcher.step():
                if output.finished:
                    assert output.request_id not in finals
                    finals[output.request_id] = output
        except KeyboardInterrupt:
            interrupts += 1
            batcher.pool.check_integrity()
        if not batcher.has_work and number > 9:
            break
    assert interrupts == 1
    assert after == seen
    assert set(finals) == set(names)
    assert sorted(output.request_id for output in told if output.finished) == sorted(names)
    for name, prompt in zip(names, given, strict=True):
        if finals[name].finish_reason != "abort":
            assert finals[name].token_ids == going_on(prompt, 20)
    batcher.check_empty()


def test_ctrl_c_while_tokens_are_chosen_repeats_the_step(batcher):
    calls = []

    def processor(ids, scores):
        calls.append(len(ids[0]))
        if len(calls) == 8:
            raise KeyboardInterrupt
        return scores

    kinds = [{"n": 3, "do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 4}, {"prompt_logprobs": 0}]
    given = some_prompts(4, seed=6)
    names = [
        batcher.add_request(prompt, max_new_tokens=12, logits_processor=[processor], **GREEDY | kind)
        for prompt, kind in zip(given, kinds, strict=True)
    ]
    with pytest.raises(KeyboardInterrupt):
        run(batcher)
    finals = run(batcher)
    assert [finals[name].token_ids for name in names] == [going_on(prompt, 12) for prompt in given]


def test_ctrl_c_while_requests_are_taken_in_ends_the_one_and_loses_none(batcher, monkeypatch):
    names, add = [batcher.add_request([5, number], max_new_tokens=3, **GREEDY) for number in range(3, 6)], Scheduler.add

    def interrupted(scheduler, group):
        if group.request.request_id == names[1]:
            raise KeyboardInterrupt
        add(scheduler, group)

    monkeypatch.setattr(Scheduler, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batcher.step()
    finals = run(batcher)
    assert [finals[name].finish_reason for name in names] == ["length", "abort", "length"]
    assert batcher.tally.stalled_seconds() == 0


def test_ctrl_c_while_outputs_are_made_loses_none(batcher, monkeypatch):
    told, names = [], []
    for number in range(3, 7):
        names.append(batcher.add_request([5, number], max_new_tokens=3, listener=told.append, **GREEDY))

    def interrupted(request):
        if request.is_finished and request.request_id == names[2]:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return output_of(request)

    monkeypatch.setattr(loop, "output_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(batcher)
    assert {name: output.token_ids for name, output in run(batcher).items()} == {
        name: going_on([5, number], 3) for number, name in enumerate(names, start=3)
    }
    assert [output.request_id for output in told if output.finished] == names


def test_ctrl_c_in_a_listener_loses_no_output_of_others(batcher):
    def interrupt(output):
        if len(output.token_ids) == 3 and not interrupted:
            interrupted.append(output)
            raise KeyboardInterrupt

    interrupted, told = [], []
    batcher.add_request([5, 6], max_new_tokens=3, listener=interrupt, **GREEDY)
    batcher.add_request([7, 8], max_new_tokens=3, listener=told.append, **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        run(batcher)
    assert told[-1].finished
    assert sorted(output.finish_reason for output in run(batcher).values()) == ["length", "length"]


def test_a_hook_may_add_and_abort_requests_but_not_step(batcher):
    added, errors = [], []

    def hook(event):
        if type(event) is ev.Finished and len(added) < 5:
            added.append(batcher.add_request([5, 6], max_new_tokens=3, **GREEDY))
            if len(added) == 3:
                batcher.abort(added[-1])
            for nested in (batcher.step, lambda: list(batcher.stream([5], max_new_tokens=1))):
                with pytest.raises(NestedStepError) as error:
                    nested()
                errors.append(error)

    batcher.hooks.append(hook)
    batcher.generate([[5, 6, 7]], max_new_tokens=3, **GREEDY)
    run(batcher)
    assert len(errors) == 10
    finals = [type(batcher.finals[name][0]) for name in added]
    assert finals == [ev.Finished] * 2 + [ev.Aborted] + [ev.Finished] * 2


def test_a_sampler_that_raises_fails_its_requests_and_no_later_one(batcher, monkeypatch):
    from hfpaged.engine import token_step

    def broken(rows, logits):
        raise RuntimeError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(token_step, "sample", broken)
        outputs = batcher.generate(some_prompts(3), max_new_tokens=3, **GREEDY)
    assert [output.finish_reason for output in outputs] == ["error"] * 3
    assert {str(output.error) for output in outputs} == {"no memory left"}
    assert batcher.generate([[5, 6]], max_new_tokens=3, **GREEDY)[0].token_ids == going_on([5, 6], 3)


def test_a_stopping_criterion_that_raises_for_one_sample_fails_its_request_only(batcher):
    def criterion(ids, scores):
        if ids.shape[1] == 5:
            raise ValueError("no")
        return False

    configs = [
        {"stopping_criteria": [criterion], "do_sample": True, "n": 2},
        GREEDY,
        {"num_beams": 2, "stopping_criteria": [criterion]},
    ]
    outputs = batcher.generate([[5, 6, 7]] * 3, configs, max_new_tokens=4)
    assert [output.finish_reason for output in outputs] == ["error", "length", "error"]
    assert isinstance(outputs[0].error, CallbackError)


def test_best_of_gives_the_likeliest_of_the_same_samples():
    from test_batcher_tokens import batcher_of, checked, prompts

    batcher = batcher_of("llama", block_size=4)
    (prompt,) = prompts((9,))
    sampled = {"max_new_tokens": 6, "do_sample": True, "seed": 3}
    (whole,) = batcher.generate(prompt, n=5, logprobs=0, **sampled)
    (best,) = batcher.generate(prompt, n=2, best_of=5, **sampled)
    ranked = sorted(whole.sequences, key=lambda seq: -sum(each.logprob for each in seq.logprobs))
    assert [seq.token_ids for seq in best.sequences] == [seq.token_ids for seq in ranked[:2]]
    assert [seq.finish_reason for seq in best.sequences] == ["length"] * 2
    checked(batcher)


def test_a_request_that_is_given_up_with_some_samples_done_says_so(batcher):
    def ends_first(ids, scores):
        return bool(ids.shape[1] == 4) and not ended.append(1) and len(ended) == 1

    ended = []
    name = batcher.add_request([5, 6], max_new_tokens=20, do_sample=True, n=3, stopping_criteria=[ends_first])
    for _ in range(5):
        batcher.step()
    batcher.abort(name)
    (output,) = batcher.step()
    assert [seq.finish_reason for seq in output.sequences] == ["stop", "abort", "abort"]
    assert output.finish_reason == "abort"


def test_the_same_prompt_many_times_is_computed_once(batcher):
    prompt = [5] * 21
    outputs = batcher.generate([prompt] * 12, max_new_tokens=2, **GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [0] + [20] * 11
    assert sum(output.metrics.computed_tokens for output in outputs) == 21 + 11 + 12
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_a_prompt_may_leave_room_for_one_token_only(batcher):
    batcher = StubBatcher(**SMALL | {"max_model_len": 40})
    given = [3 + number % 50 for number in range(39)]
    assert batcher.generate([given], max_new_tokens=1, **GREEDY)[0].token_ids == going_on(given, 1)
    for prompt, new in ((given, 2), ([*given, 5], 1)):
        with pytest.raises(RequestTooLongError, match=r"are 41, .* is 40"):
            batcher.add_request(prompt, max_new_tokens=new)
    batcher.check_empty()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_batcher_can_be_made_over_a_pool_that_holds_less_than_its_trial(name):
    from test_batcher_tokens import alone, batcher_of, checked

    import hfpaged

    model = tiny_models.shared(name)
    hfpaged.unpatch(model)
    (expected,) = alone(model, [5, 6], max_new_tokens=2)
    batcher = batcher_of(name, block_size=1, num_blocks=8, max_num_seqs=1, max_num_batched_tokens=4)
    assert batcher.generate([5, 6], max_new_tokens=2, **GREEDY)[0].token_ids == expected
    assert batcher.describe()["forward"] == "packed"
    checked(batcher)


def test_a_request_that_fills_the_pool_begins_with_what_is_known_of_it():
    """All blocks are those of a longer prefix, and none is left for a copy of the last one, which is written then."""
    model = tiny_models.shared("llama")
    batcher = StubBatcher(block_size=4, num_blocks=9, max_num_seqs=2)
    given = [3 + number for number in range(36)]
    cache = PagedCache(model, pool=batcher.pool)
    with torch.no_grad():
        model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True)
    cache.free()
    (output,) = batcher.generate([given[:35]], max_new_tokens=1, **GREEDY)
    assert (output.finish_reason, output.num_cached_tokens) == ("length", 34)
    batcher.check_empty()


def test_a_stream_that_nobody_began_is_given_up_too(batcher):
    stream = batcher.stream([5, 6, 7], max_new_tokens=20, **GREEDY)
    batcher.step()
    assert batcher.pool.num_free < batcher.pool.num_blocks
    del stream
    gc.collect()
    assert [output.finish_reason for output in batcher.step()] == ["abort"]


def test_a_task_that_is_cancelled_while_it_adds_leaves_no_request(batcher):
    async def main():
        async with batcher.running() as engine:
            for turn in range(20):
                task = asyncio.create_task(engine.generate([5, 6, 7], max_new_tokens=200, **GREEDY))
                await asyncio.sleep(0.0002 * turn)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            deadline = time.monotonic() + 20
            while batcher.has_work and time.monotonic() < deadline:
                await asyncio.sleep(0.001)
            assert not batcher.has_work

    asyncio.run(main())
    assert {type(events[0]) for events in batcher.finals.values()} == {ev.Aborted}


def test_blocks_run_out_in_the_middle_of_sequences_that_are_computed_one_by_one(batcher):
    """A model that cannot pack: what the first sequences stored is not forgotten when the next finds no block."""
    batcher._parts.runner.packs = False
    given = some_prompts(4, seed=8)
    names = [batcher.add_request(prompt, max_new_tokens=6, **GREEDY) for prompt in given]
    for _ in range(3):
        batcher.step()
    calls = []

    def no_blocks():
        calls.append(1)
        if len(calls) == 3:
            raise OutOfBlocksError(1, 0, 64)

    batcher.before_forward = no_blocks
    finals = run(batcher)
    assert [finals[name].token_ids for name in names] == [going_on(prompt, 6) for prompt in given]
