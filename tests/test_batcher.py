"""The batcher as its users meet it: outputs, streams, aborts, refusals, failures, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
import tiny_models
import torch
import transformers
from test_batcher_tokens import alone, batcher_of, checked, prompts

import hfpaged
from hfpaged import ContinuousBatcher, PagedCache
from hfpaged.engine import events as ev
from hfpaged.errors import (
    BatcherClosedError,
    InvalidConfigError,
    InvalidLogitsError,
    NestedStepError,
    OutOfBlocksError,
    RequestTooLongError,
    UnsupportedModelError,
)

GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def batcher():
    batcher = batcher_of("llama", block_size=4, num_blocks=100, max_num_batched_tokens=32, max_num_seqs=8)
    yield batcher
    checked(batcher)


@pytest.fixture
def seen(batcher):
    events = []
    batcher.hooks.append(events.append)
    return events


def of_kind(events, kind):
    return [event for event in events if type(event) is kind]


def test_an_output_tells_all_about_its_request(batcher):
    (output,) = batcher.generate(prompts((9,)), **GREEDY)
    assert output.prompt_token_ids == prompts((9,))[0]
    assert len(output.token_ids) == 6
    assert (output.text, output.prompt, output.logprobs, output.error) == (None, None, None, None)
    assert output.finished
    assert output.finish_reason == output.sequences[0].finish_reason == "length"
    metrics = output.metrics
    times = [metrics.arrival_time, metrics.admitted_time, metrics.first_token_time, metrics.finished_time]
    assert times == sorted(times)
    assert abs(metrics.arrival_time - time.time()) < 60
    assert metrics.queue_time >= 0
    assert metrics.time_to_first_token > 0
    assert (metrics.preemptions, metrics.peak_blocks, metrics.computed_tokens) == (0, 4, 9 + 5)
    with pytest.raises(AttributeError):
        output.finished = False


def test_an_output_that_is_printed_shows_its_own_tokens_only(batcher):
    name = batcher.add_request([5, 6, 7], request_id="printed", **GREEDY)
    (first,) = batcher.step()
    while batcher.has_work:
        (last,) = batcher.step()
    assert name in repr(first)
    assert f"Tokens({first.token_ids})" in repr(first)
    assert f"Tokens({last.token_ids})" in repr(last)
    assert len(last.token_ids) == 6


def test_a_request_fails_as_a_whole_when_one_of_its_samples_does(batcher):
    sampled = {"do_sample": True, "n": 2, "seed": 5, "max_new_tokens": 4}
    first, second = (seq.token_ids[0] for seq in batcher.generate([5, 6, 7], **sampled)[0].sequences)
    assert first != second

    def poison(ids, scores):
        return scores * float("nan") if ids[0, -1] == second else scores

    (output,) = batcher.generate([5, 6, 7], **sampled, eos_token_id=first, logits_processor=[poison])
    assert isinstance(output.error, InvalidLogitsError)
    assert [seq.finish_reason for seq in output.sequences] == ["stop", "error"]
    assert output.finish_reason == "error"


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_own_settings(batcher):
    configs = [{"max_new_tokens": count, "do_sample": False} for count in (9, 1, 5, 3)]
    outputs = batcher.generate(prompts((4, 9, 2, 30)), configs)
    assert [len(output.token_ids) for output in outputs] == [9, 1, 5, 3]
    assert [output.prompt_token_ids for output in outputs] == prompts((4, 9, 2, 30))


def test_one_prompt_may_come_alone_and_as_a_tensor(batcher):
    (prompt,) = prompts((7,))
    expected = batcher.generate([prompt], **GREEDY)[0].token_ids
    assert batcher.generate(prompt, **GREEDY)[0].token_ids == expected
    assert batcher.generate([torch.tensor([prompt])], **GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_what_a_tokenizer_gives_back_is_a_prompt_without_its_padding(batcher, kind):
    first, second = prompts((7, 4))
    pad = len(first) - len(second)
    encoding = transformers.BatchEncoding(
        {
            "input_ids": kind([first, [0] * pad + second]),
            "attention_mask": kind([[1] * len(first), [0] * pad + [1] * len(second)]),
        }
    )
    outputs = batcher.generate(encoding, max_new_tokens=1, do_sample=False)
    assert [output.prompt_token_ids for output in outputs] == [first, second]
    alone = transformers.BatchEncoding({"input_ids": kind(first), "attention_mask": kind([1] * len(first))})
    assert batcher.generate(alone, max_new_tokens=1)[0].prompt_token_ids == first
    assert batcher.generate([alone, alone], max_new_tokens=1)[1].prompt_token_ids == first
    assert next(batcher.stream(alone, max_new_tokens=1)).output.prompt_token_ids == first
    with pytest.raises(InvalidConfigError, match="these are 2"):
        batcher.add_request(encoding, max_new_tokens=1)


def test_steps_by_hand(batcher):
    first = batcher.add_request(prompts((5,))[0], **GREEDY)
    second = batcher.add_request(prompts((40,))[0], request_id="mine", **GREEDY)
    assert (first, second) == ("request-0", "mine")
    finals, moved = [], []
    while batcher.has_work:
        for output in batcher.step():
            moved.append((output.request_id, len(output.token_ids)))
            finals += [output.request_id] if output.finished else []
    assert sorted(finals) == ["mine", "request-0"]
    assert [count for name, count in moved if name == "mine"] == [1, 2, 3, 4, 5, 6]
    assert batcher.step() == []


def test_a_stream_gives_what_is_new_and_then_ends(batcher):
    (prompt,) = prompts((9,))
    pieces = list(batcher.stream(prompt, **GREEDY))
    assert [token for piece in pieces for token in piece.token_ids] == batcher.generate(prompt, **GREEDY)[0].token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * 5 + ["length"]
    assert pieces[-1].output.finished


def test_streams_in_turns_share_the_steps(batcher, seen):
    streams = [batcher.stream(prompt, **GREEDY) for prompt in prompts((9, 3))]
    for pair in zip(*streams, strict=True):
        assert all(piece.token_ids for piece in pair)
    assert max(event.num_sequences for event in of_kind(seen, ev.StepFinished)) == 2


def test_a_stream_that_is_closed_gives_its_blocks_back_at_once_and_a_dropped_one_with_the_next_step(batcher):
    stream = batcher.stream(prompts((9,))[0], max_new_tokens=50, do_sample=False)
    next(stream)
    assert batcher.pool.num_free < batcher.pool.num_blocks
    stream.close()
    assert batcher.pool.num_free == batcher.pool.num_blocks
    assert list(stream) == []
    dropped = batcher.stream(prompts((9,))[0], max_new_tokens=50, do_sample=False)
    next(dropped)
    never_begun = batcher.stream(prompts((9,))[0], max_new_tokens=50, do_sample=False)
    del dropped, never_begun
    gc.collect()
    reasons = [output.finish_reason for output in batcher.step() if output.finished]
    assert reasons == ["abort", "abort"]
    assert batcher.pool.num_free == batcher.pool.num_blocks


def test_a_batcher_that_is_dropped_gives_the_blocks_of_a_shared_pool_back():
    cache = PagedCache(tiny_models.shared("llama"), num_blocks=40)
    batcher = ContinuousBatcher(tiny_models.shared("llama"), pool=cache.pool, prepack=False)
    batcher.add_request([5, 6, 7], **GREEDY)
    batcher.step()
    assert cache.pool.num_free < 40
    del batcher
    gc.collect()
    assert cache.pool.num_free == 40
    cache.pool.check_integrity()
    hfpaged.unpatch(tiny_models.shared("llama"))


def test_an_abort_frees_blocks_at_once_and_ends_in_one_record(batcher, seen):
    running = batcher.add_request(prompts((9,))[0], max_new_tokens=50, do_sample=False)
    batcher.step()
    waiting = batcher.add_request(prompts((5,))[0], **GREEDY)
    assert batcher.abort(running)
    assert batcher.pool.num_free == batcher.pool.num_blocks
    assert batcher.abort(waiting)
    assert not batcher.abort(running)
    assert not batcher.abort("nobody")
    outputs = batcher.step()
    assert {output.request_id: output.finish_reason for output in outputs} == {running: "abort", waiting: "abort"}
    assert [len(output.token_ids) for output in outputs] == [1, 0]
    assert batcher.step() == []
    assert [event.request_id for event in of_kind(seen, ev.Aborted)] == [running, waiting]


def test_an_abort_from_a_hook_in_the_middle_of_a_step_is_done_when_the_step_is(batcher):
    request = batcher.add_request(prompts((9,))[0], max_new_tokens=50, do_sample=False)
    batcher.hooks.append(lambda event: type(event) is ev.FirstToken and batcher.abort(request))
    batcher.step()
    assert batcher.pool.num_free == batcher.pool.num_blocks


REFUSED = [
    ([], {}, InvalidConfigError, "empty"),
    ([5, 500], {}, InvalidConfigError, "500"),
    ([5, -1], {}, InvalidConfigError, "-1"),
    ("a text", {}, InvalidConfigError, "tokenizer"),
    ({"role": "user", "content": "Hi"}, {}, InvalidConfigError, "apply_chat_template"),
    ([5] * 300, {}, RequestTooLongError, "256"),
    ([5] * 30, {"max_new_tokens": 240}, RequestTooLongError, "256"),
    ([5], {"temperature": -1.0, "do_sample": True}, InvalidConfigError, "temperature"),
    ([5], {"no_such_setting": 1}, InvalidConfigError, "no_such_setting"),
    ([5], {"num_beams": 2, "logprobs": 0}, InvalidConfigError, "logprobs=0 with num_beams=2"),
    ([5], {"num_beams": 9}, InvalidConfigError, "max_num_seqs=8"),
]


@pytest.mark.parametrize(("prompt", "more", "error", "words"), REFUSED, ids=[case[3] for case in REFUSED])
def test_what_cannot_run_is_refused_at_once_and_harms_nobody(batcher, prompt, more, error, words):
    batcher.add_request(prompts((5,))[0], **GREEDY)
    with pytest.raises(error, match=words):
        batcher.add_request(prompt, **{"max_new_tokens": 4} | more)
    with pytest.raises(error, match=words):
        batcher.generate([[5, 6], prompt], **{"max_new_tokens": 4} | more)
    finals = [output for _ in range(20) for output in batcher.step() if output.finished]
    assert sorted(output.finish_reason for output in finals) == ["abort", "length"][-len(finals) :]


def test_a_request_that_no_empty_pool_holds_is_refused_with_the_numbers():
    batcher = batcher_of("llama", block_size=4, num_blocks=10, max_num_batched_tokens=64, max_num_seqs=8)
    with pytest.raises(RequestTooLongError, match=r"39 prompt tokens and 4 new ones .* 11 blocks .* has 10"):
        batcher.add_request(prompts((39,))[0], max_new_tokens=4)
    assert len(batcher.generate(prompts((36,)), max_new_tokens=4, do_sample=False)[0].token_ids) == 4  # all ten
    checked(batcher)


@pytest.mark.parametrize("given", [None, 5])
def test_what_is_no_list_of_prompts_is_refused(batcher, given):
    with pytest.raises(InvalidConfigError, match=f"prompts={given}"):
        batcher.generate(given)


def test_request_ids_are_told_apart(batcher):
    batcher.add_request([5, 6], request_id="mine", **GREEDY)
    with pytest.raises(InvalidConfigError, match="mine"):
        batcher.add_request([5, 6], request_id="mine", **GREEDY)
    batcher.abort("mine")
    batcher.step()
    batcher.add_request([5, 6], request_id="mine", **GREEDY)
    batcher.abort("mine")
    batcher.step()


def test_a_name_that_somebody_has_chosen_is_given_to_nobody_else(batcher):
    batcher.add_request([5, 6], request_id="request-1", **GREEDY)
    assert batcher.add_request([5, 6], **GREEDY) != "request-1"
    assert {output.request_id for output in batcher.generate([[5], [6]], **GREEDY)} == {"request-2", "request-3"}


SIZES = [
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens=32"),
    ({"policy": "random"}, "random"),
    ({"preemption": "oldest"}, "oldest"),
    ({"watermark": 1.5}, "1.5"),
    ({"max_step_stretch": 0.5}, "0.5"),
    ({"num_blocks": None, "memory": 1.5}, "1.5"),
    ({"num_blocks": None, "memory": "much"}, "much"),
    ({"kv_dtype": "int3"}, "int3"),
]


@pytest.mark.parametrize(("sizes", "words"), SIZES, ids=[case[1] for case in SIZES])
def test_sizes_that_cannot_work_are_refused(sizes, words):
    with pytest.raises(InvalidConfigError, match=words):
        batcher_of("llama", **sizes)
    hfpaged.unpatch(tiny_models.shared("llama"))


def test_a_model_in_training_mode_is_refused():
    model = tiny_models.make("llama").train()
    with pytest.raises(InvalidConfigError, match=r"eval\(\)"):
        ContinuousBatcher(model, num_blocks=10)
    with pytest.raises(UnsupportedModelError):
        ContinuousBatcher(tiny_models.make_t5(), num_blocks=10)


class Broken(torch.nn.Module):
    """A layer that raises, or gives NaN, when it is told to."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.fault = layer, None

    def forward(self, *args, **kwargs):
        if isinstance(self.fault, Exception):
            raise self.fault
        return self.layer(*args, **kwargs)


@pytest.fixture
def fragile():
    model = tiny_models.make("llama")
    model.model.layers[1].mlp = Broken(model.model.layers[1].mlp)
    batcher = ContinuousBatcher(model, num_blocks=60, block_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    yield batcher, model.model.layers[1].mlp
    checked(batcher)


@pytest.mark.parametrize("fault", [ValueError("broken layer"), torch.OutOfMemoryError("no memory left")], ids=repr)
def test_a_forward_that_raises_fails_the_requests_of_its_step_and_no_other(fragile, fault):
    batcher, broken = fragile
    seen = []
    batcher.hooks.append(seen.append)
    ids = [batcher.add_request(prompt, **GREEDY) for prompt in prompts((5, 9, 7))]  # two at once, one waits
    batcher.step()
    broken.fault = fault
    failed = batcher.step()
    broken.fault = None
    assert [(output.request_id, output.finish_reason) for output in failed] == [(ids[0], "error"), (ids[1], "error")]
    assert all(output.error is fault for output in failed)
    assert batcher.pool.num_free == batcher.pool.num_blocks
    rest = [output for _ in range(10) for output in batcher.step() if output.finished]
    assert [(output.request_id, output.finish_reason) for output in rest] == [(ids[2], "length")]
    assert rest[0].token_ids == alone(batcher.model, prompts((5, 9, 7))[2], **GREEDY)[0]
    assert [event.error for event in of_kind(seen, ev.Failed)] == [fault, fault]


def test_a_request_whose_logits_are_no_numbers_fails_alone(batcher):
    def poison(ids, scores):
        return scores * float("nan") if ids.shape[1] > 11 else scores

    good, bad = prompts((10, 10))
    configs = [GREEDY, GREEDY | {"logits_processor": [poison]}]
    outputs = batcher.generate([good, bad], configs)
    assert [output.finish_reason for output in outputs] == ["length", "error"]
    assert isinstance(outputs[1].error, InvalidLogitsError)
    assert len(outputs[1].token_ids) == 2


def test_ctrl_c_in_a_forward_leaves_the_pool_whole_and_the_batcher_usable(fragile):
    batcher, broken = fragile
    (prompt,) = prompts((9,))
    stream = batcher.stream(prompt, **GREEDY)
    tokens = next(stream).token_ids

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = broken.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        batcher.step()
    handle.remove()
    batcher.pool.check_integrity()
    tokens += [token for piece in stream for token in piece.token_ids]
    assert tokens == alone(batcher.model, prompt, **GREEDY)[0]


def test_blocks_that_other_caches_hold_are_missed_with_the_numbers():
    model = tiny_models.shared("llama")
    batcher = batcher_of("llama", block_size=4, num_blocks=20, max_num_seqs=4)
    cache = PagedCache(model, pool=batcher.pool)
    ids = torch.tensor(prompts((60,)))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    (output,) = batcher.generate(prompts((30,), seed=3), max_new_tokens=4, do_sample=False)
    assert output.finish_reason == "error"
    assert isinstance(output.error, OutOfBlocksError)
    cache.free()
    (output,) = batcher.generate(prompts((30,), seed=3), max_new_tokens=4, do_sample=False)
    assert output.finish_reason == "length"
    checked(batcher)


def test_a_prefix_of_a_cache_on_the_same_pool_is_found_and_the_other_way_round():
    model = tiny_models.shared("llama")
    batcher = batcher_of("llama", block_size=4)
    (prompt,) = prompts((40,))
    ids = torch.tensor([prompt])
    cache = PagedCache(model, pool=batcher.pool)
    expected = model.generate(ids, past_key_values=cache, **GREEDY)[0, 40:].tolist()
    (output,) = batcher.generate([prompt], **GREEDY)
    assert output.token_ids == expected
    assert output.num_cached_tokens == 39
    other = prompts((40,), seed=5)[0]
    batcher.generate([other], **GREEDY)
    again = PagedCache(model, pool=batcher.pool)
    model.generate(torch.tensor([other]), past_key_values=again, **GREEDY)
    assert again.explain_last()[0].hit_tokens == 39
    for each in (cache, again):
        each.free()
    checked(batcher)


def test_salts_keep_prefixes_apart(batcher):
    (prompt,) = prompts((40,))
    hits = []
    for salt in ("a", "b", "a", None, None):
        request = []
        batcher.add_request(prompt, salt=salt, listener=request.append, **GREEDY)
        while batcher.has_work:
            batcher.step()
        hits.append(request[-1].num_cached_tokens)
    assert hits == [0, 0, 39, 0, 39]


def test_priority_goes_first_and_first_come_first_served_within():
    for policy, expected in (("priority", [2, 1, 3, 0]), ("fcfs", [0, 1, 2, 3])):
        batcher = batcher_of("llama", policy=policy, max_num_seqs=1)
        seen = []
        batcher.hooks.append(seen.append)
        ids = [
            batcher.add_request([5, 6, 7], priority=priority, max_new_tokens=2) for priority in (9, 1, 0, 1)
        ]  # fmt: skip
        while batcher.has_work:
            batcher.step()
        assert [ids.index(event.request_id) for event in of_kind(seen, ev.Admitted)] == expected
        checked(batcher)


def test_a_tenant_with_many_requests_does_not_keep_another_waiting():
    batcher = batcher_of("llama", max_num_seqs=1)
    seen = []
    batcher.hooks.append(seen.append)
    for number in range(6):
        batcher.add_request([5, 6, 7], tenant="many", request_id=f"many-{number}", max_new_tokens=3)
    for number in range(2):
        batcher.add_request([5, 6, 7], tenant="few", request_id=f"few-{number}", max_new_tokens=3)
    while batcher.has_work:
        batcher.step()
    order = [event.request_id for event in of_kind(seen, ev.Admitted)]
    assert [order.index("few-0"), order.index("few-1")] == [1, 3]
    checked(batcher)


def test_every_event_is_told_in_order(batcher, seen):
    batcher.generate(prompts((40,)), max_new_tokens=2, do_sample=False)
    batcher.generate(prompts((40,)), max_new_tokens=2, do_sample=False)
    kinds = [type(event).__name__ for event in seen]
    began, ended = ["Arrived", "Admitted", "PrefixMatched"], ["StepFinished", "Finished", "StepFinished"]
    first = [*began, "Prefilled", "StepFinished", "Prefilled", "FirstToken", *ended]  # 40 tokens, 32 in a step
    assert kinds == [*first, *began, "Prefilled", "FirstToken", *ended]
    _, hit = of_kind(seen, ev.PrefixMatched)
    assert (hit.hit, hit.queried, hit.reason) == (39, 40, "complete")
    assert hit.computed_by == (of_kind(seen, ev.Arrived)[0].origin,)
    assert [(chunk.start, chunk.tokens) for chunk in of_kind(seen, ev.Prefilled)] == [(0, 32), (32, 8), (39, 1)]
    assert [event.time for event in seen] == sorted(event.time for event in seen)


def test_a_hook_that_raises_stops_nothing(batcher):
    batcher.hooks.append(lambda event: 1 / 0)
    assert batcher.generate(prompts((5,)), **GREEDY)[0].finish_reason == "length"


def test_closing_aborts_or_drains():
    for drain, reason in ((False, "abort"), (True, "length")):
        batcher = batcher_of("llama")
        outputs = []
        batcher.add_request([5, 6], listener=outputs.append, **GREEDY)
        batcher.step()
        batcher.close(drain=drain)
        assert outputs[-1].finish_reason == reason
        with pytest.raises(BatcherClosedError):
            batcher.add_request([5, 6], **GREEDY)
        checked(batcher)


def test_closing_gives_everything_back_even_if_it_is_interrupted(batcher):
    batcher.add_request([5, 6], **GREEDY)
    batcher.step()

    def interrupt():
        raise KeyboardInterrupt

    batcher.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        batcher.close(drain=True)
    assert not batcher.has_work
    assert batcher.pool.num_free == batcher.pool.num_blocks


def test_leaving_a_with_block_closes():
    with batcher_of("llama") as batcher:
        batcher.add_request([5, 6], **GREEDY)
    assert not batcher.has_work
    checked(batcher)


def test_many_await_one_engine():
    batcher = batcher_of("llama", block_size=4, num_blocks=400)
    given = prompts((4, 9, 1, 30, 22))
    expected = [output.token_ids for output in batcher.generate(given, **GREEDY)]

    async def stream(engine, prompt):
        return [token async for piece in engine.stream(prompt, **GREEDY) for token in piece.token_ids]

    async def main():
        async with batcher.running() as engine:
            streamed = await asyncio.gather(*(stream(engine, prompt) for prompt in given))
            whole = await asyncio.gather(*(engine.generate(prompt, **GREEDY) for prompt in given))
            assert engine.is_healthy
        assert not engine.is_alive
        with pytest.raises(BatcherClosedError):
            await engine.generate(given[0])
        return streamed, [output.token_ids for output in whole]

    assert asyncio.run(main()) == (expected, expected)
    checked(batcher)


def test_a_cancelled_task_aborts_its_request():
    batcher = batcher_of("llama")

    async def main():
        async with batcher.running() as engine:
            task = asyncio.create_task(engine.generate([5, 6], max_new_tokens=200, do_sample=False))
            while batcher.pool.num_free == batcher.pool.num_blocks:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while batcher.has_work:
                await asyncio.sleep(0.001)
        assert batcher.pool.num_free == batcher.pool.num_blocks

    asyncio.run(main())
    checked(batcher)


def test_a_task_that_is_cancelled_while_its_request_is_made_leaves_none():
    batcher = batcher_of("llama")
    made, may_go, plain = threading.Event(), threading.Event(), batcher.add_request

    def slow(*args, **kwargs):
        may_go.wait(20)
        try:
            return plain(*args, **kwargs)
        finally:
            made.set()

    batcher.add_request = slow

    async def main():
        async with batcher.running() as engine:
            task = asyncio.create_task(engine.generate([5, 6], max_new_tokens=200, do_sample=False))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_go.set()
            await asyncio.to_thread(made.wait, 20)
            for _ in range(200):
                await asyncio.sleep(0.001)
                if not batcher.loop.is_there("request-0"):
                    return True
        return False

    assert asyncio.run(main())
    checked(batcher)


def test_a_request_that_comes_when_the_engine_has_stopped_is_aborted_and_not_awaited_for_ever():
    batcher = batcher_of("llama")
    may_go, plain = threading.Event(), batcher.add_request
    batcher.add_request = lambda *args, **kwargs: may_go.wait(20) and plain(*args, **kwargs)

    async def main():
        async with batcher.running() as engine:
            task = asyncio.create_task(engine.generate([5, 6], **GREEDY))
            await asyncio.sleep(0.01)
        may_go.set()
        assert (await asyncio.wait_for(task, 20)).finish_reason == "abort"

    asyncio.run(main())
    checked(batcher)


def test_an_error_of_the_engine_itself_fails_all_and_the_thread_goes_on(batcher):
    scheduler, fault = batcher._parts.scheduler, ZeroDivisionError("ours")
    plain = scheduler.schedule

    def broken(budget):
        raise fault

    async def main():
        async with batcher.running() as engine:
            scheduler.schedule = broken
            failed = await asyncio.wait_for(engine.generate([5, 6], **GREEDY), 20)
            scheduler.schedule = plain
            return failed, await asyncio.wait_for(engine.generate([5, 6], **GREEDY), 20)

    failed, good = asyncio.run(main())
    assert (failed.finish_reason, failed.error) == ("error", fault)
    assert good.finish_reason == "length"


def test_two_threads_for_one_batcher_are_refused(batcher):
    with batcher.running() as engine:
        with pytest.raises(InvalidConfigError, match="already"):
            batcher.running().__enter__()
        assert engine.is_alive
    with batcher.running():
        assert batcher.generate([5, 6], **GREEDY)[0].finish_reason == "length"


def test_a_listener_that_wants_a_step_in_a_step_is_told_so_and_does_not_wait_for_itself(batcher):
    raised = []

    def nested(output):
        for act in (batcher.step, batcher.close, lambda: batcher.generate([5])):
            with pytest.raises(NestedStepError) as caught:
                act()
            raised.append(caught.value)

    batcher.add_request([5, 6], listener=nested, max_new_tokens=1)
    batcher.step()
    assert len(raised) == 3
    assert batcher.generate([5, 6], **GREEDY)[0].finish_reason == "length"  # not half closed


def test_a_step_that_does_not_come_back_is_told_of(fragile, caplog):
    batcher, broken = fragile
    seen, release = [], threading.Event()
    batcher.hooks.append(seen.append)
    handle = broken.register_forward_pre_hook(lambda *args: release.wait(20) and None)
    with batcher.running(step_timeout=0.05) as engine:
        batcher.add_request([5, 6], **GREEDY)
        while not of_kind(seen, ev.StepStuck):
            time.sleep(0.01)
        assert not engine.is_healthy
        release.set()
        while batcher.has_work:
            time.sleep(0.01)
        assert engine.is_healthy
    handle.remove()
    assert "has not come back" in caplog.text
    assert "release.wait" in caplog.text


def test_what_was_decided_can_be_read(batcher):
    told = batcher.describe()
    assert told["num_blocks"] == 100
    assert told["pool_bytes"] == 100 * batcher.pool.storage.block_bytes
    assert (told["forward"], told["pool_tokens"]) == ("packed", 400)


def test_a_share_of_the_device_leaves_room_for_activations():
    batcher = batcher_of("llama", num_blocks=None, memory=0.6, max_num_batched_tokens=200)
    sizing = batcher._parts.sizing
    assert sizing.share == 0.6
    assert 0 < sizing.used < sizing.total * 0.6
    block_bytes = batcher.pool.storage.block_bytes
    assert sizing.pool - block_bytes < batcher.pool.num_blocks * block_bytes <= sizing.pool
    assert batcher.generate([5, 6, 7], **GREEDY)[0].finish_reason == "length"
    batcher.close()
