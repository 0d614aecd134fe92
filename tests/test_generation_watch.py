"""Calls of generate() are told of while somebody watches, and only then."""

from __future__ import annotations

import functools

import pytest
import tiny_models
import torch
from fake_clock import FakeClock
from transformers import DynamicCache, GenerationConfig, GenerationMixin

import hfpaged
from hfpaged import PagedCache, compat, generation_events
from hfpaged.generation_events import GenerationBegan, GenerationEnded, GenerationPrefilled

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 6, "do_sample": False}
CACHE = compat.cache_argument()


@pytest.fixture
def seen():
    events = []
    hook = events.append
    generation_events.watch(hook)
    yield events
    generation_events.unwatch(hook)


@pytest.fixture
def model():
    model = tiny_models.make("llama")
    yield model
    hfpaged.unpatch(model)


def ids(rows=1, length=20, seed=0):
    return torch.randint(3, tiny_models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def kinds(events):
    return [type(event) for event in events]


WHOLE = [GenerationBegan, GenerationPrefilled, GenerationEnded]


def test_generate_is_as_it_was_unless_somebody_watches(model):
    before = GenerationMixin.generate
    hook = [].append
    generation_events.watch(hook)
    assert GenerationMixin.generate is not before
    assert GenerationMixin.generate.__wrapped__ is before
    generation_events.unwatch(hook)
    generation_events.unwatch(hook)  # once more is no error
    assert GenerationMixin.generate is before


@pytest.mark.parametrize("wraps", [functools.wraps, lambda inner: lambda outer: outer], ids=["known", "unknown"])
def test_what_others_wrap_around_generate_stays_and_calls_are_told_of_once(monkeypatch, model, wraps):
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)  # as it was, afterwards
    events, calls = [], []
    hook = events.append
    generation_events.watch(hook)
    inner = GenerationMixin.generate

    @wraps(inner)
    def theirs(self, *args, **kwargs):
        calls.append(self)
        return inner(self, *args, **kwargs)

    GenerationMixin.generate = theirs
    for _ in range(2):
        generation_events.unwatch(hook)
        assert GenerationMixin.generate is theirs
        model.generate(ids(), **{CACHE: PagedCache(model)}, **GREEDY)
        assert events == []
        generation_events.watch(hook)
        model.generate(ids(), **{CACHE: PagedCache(model)}, **GREEDY)
        assert kinds(events) == WHOLE
        events.clear()
    generation_events.unwatch(hook)
    assert calls == [model] * 4


def test_a_call_is_told_of_from_its_beginning_to_its_end(model, seen):
    cache = PagedCache(model, block_size=4)
    prompt = ids(2)
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    out = model.generate(prompt, attention_mask=mask, **{CACHE: cache}, **GREEDY)
    expected = model.generate(prompt, attention_mask=mask, **{CACHE: DynamicCache()}, **GREEDY)
    assert torch.equal(out, expected)
    assert kinds(seen) == WHOLE
    began, prefilled, ended = seen
    assert began.call is prefilled.call is ended.call
    call = began.call
    assert (call.model_name, call.rows, call.prompt_tokens) == ("LlamaForCausalLM", 2, 35)
    assert call.settings["max_new_tokens"] == 6
    assert call.kv_format == "auto"
    assert (prefilled.queried, prefilled.hit, prefilled.past, prefilled.reasons) == (35, 0, 0, ("never seen",))
    times = [call.began, prefilled.began, prefilled.time, ended.time]
    assert times == sorted(times)
    assert prefilled.time >= ended.first_token_time > prefilled.began
    assert (ended.forwards, ended.error) == (6, None)
    assert ended.output_tokens == sum(
        6 if 2 not in row else row.index(2) + 1 for row in out[:, prompt.shape[1] :].tolist()
    )
    assert ended.peak_bytes == ended.peak_blocks * cache.pool.storage.block_bytes
    assert ended.peak_blocks == sum(-(-(length + 5) // 4) for length in (15, 20))


def test_tokens_behind_the_end_of_a_row_are_not_counted(model, seen):
    prompt = ids(3, seed=4)
    whole = model.generate(prompt, **{CACHE: PagedCache(model)}, max_new_tokens=8, do_sample=False, eos_token_id=None)
    ends = [row[2] for row in whole[:, 20:].tolist()]  # the third token of each row ends it
    out = model.generate(prompt, **{CACHE: PagedCache(model)}, max_new_tokens=8, do_sample=False, eos_token_id=ends)
    counted = 0
    for row in out[:, 20:].tolist():
        counted += next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    assert seen[-1].output_tokens == counted
    assert counted <= 9 < out[:, 20:].numel() or out.shape[1] == 23


def test_a_config_that_is_given_by_its_place_counts(model, seen):
    free = model.generate(ids(), **{CACHE: PagedCache(model)}, **GREEDY)[0, 20:].tolist()
    config = GenerationConfig(**GREEDY, eos_token_id=free[2])
    model.generate(ids(), config, **{CACHE: PagedCache(model)})
    assert seen[-1].call.settings["max_new_tokens"] == 6
    assert seen[-1].output_tokens == free.index(free[2]) + 1
    model.generate(None, config, input_ids=ids(2), **{CACHE: PagedCache(model)})
    assert (seen[-1].call.rows, seen[-1].call.prompt_tokens) == (2, 40)


def test_who_computed_a_prefix_is_told_and_so_is_what_a_cache_held_already(model, seen):
    first = PagedCache(model, block_size=4)
    prompt = ids()
    out = model.generate(prompt, **{CACHE: first}, **GREEDY)
    model.generate(prompt, **{CACHE: PagedCache(model, pool=first.pool)}, **GREEDY)
    model.generate(torch.cat([out, ids(1, 3)], 1), **{CACHE: first}, **GREEDY)
    cold, warm, chat = [event for event in seen if type(event) is GenerationPrefilled]
    assert cold.computed_by == ()
    assert (warm.hit, warm.queried, warm.reasons, warm.computed_by) == (19, 20, ("complete",), (cold.call.origin,))
    assert (chat.past, chat.hit, chat.queried, chat.computed_by) == (25, 0, 0, ())
    ends = [event for event in seen if type(event) is GenerationEnded]
    assert ends[1].shared_bytes == 5 * first.pool.storage.block_bytes


def test_a_batcher_knows_the_call_that_computed_its_prefix_and_the_other_way_round(model, seen):
    from hfpaged.engine import events as ev

    cache = PagedCache(model, block_size=4, num_blocks=100)
    model.generate(ids(), **{CACHE: cache}, **GREEDY)
    told = []
    with hfpaged.ContinuousBatcher(model, pool=cache.pool, hooks=(told.append,)) as batcher:
        batcher.generate([ids()[0].tolist(), ids(seed=1)[0].tolist()], **GREEDY)
        (match, _) = [event for event in told if type(event) is ev.PrefixMatched]
        assert match.computed_by == (seen[0].call.origin,)
        model.generate(ids(seed=1), **{CACHE: PagedCache(model, pool=cache.pool)}, **GREEDY)
    origins = {event.origin for event in told if type(event) is ev.Arrived}
    assert set(seen[-2].computed_by) <= origins
    assert seen[-2].computed_by


def test_rows_with_a_common_part_are_one_call(model, seen):
    common = ids(1, 40)
    prompt = torch.cat([common.expand(4, -1), ids(4, 3, seed=7)], 1)
    cache = PagedCache(model, block_size=4)
    model.generate(prompt, **{CACHE: cache}, **GREEDY)
    assert kinds(seen) == WHOLE
    model.generate(prompt, **{CACHE: PagedCache(model, pool=cache.pool)}, **GREEDY)
    assert seen[-2].computed_by == (seen[0].call.origin,)  # pieces that were computed apart, too


def test_beams_and_samples_are_one_call(model, seen):
    model.generate(ids(), **{CACHE: PagedCache(model)}, num_beams=3, num_return_sequences=2, **GREEDY)
    assert kinds(seen) == WHOLE
    assert seen[0].call.settings["num_beams"] == 3
    assert seen[-1].shared_bytes == 0


def test_a_call_that_fails_is_told_with_its_error(model, seen):
    cache = PagedCache(model, num_blocks=4)
    with pytest.raises(hfpaged.OutOfBlocksError) as caught:
        model.generate(ids(1, 100), **{CACHE: cache}, **GREEDY)
    assert kinds(seen) == [GenerationBegan, GenerationEnded]
    assert seen[-1].error is caught.value
    assert (seen[-1].output_tokens, seen[-1].first_token_time) == (0, None)
    model.generate(ids(1, 10), **{CACHE: cache}, **GREEDY)
    assert kinds(seen)[2:] == WHOLE


def test_ctrl_c_ends_the_call(model, seen):
    def interrupt(_, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(ids(), **{CACHE: PagedCache(model)}, logits_processor=[interrupt], **GREEDY)
    assert kinds(seen) == WHOLE
    assert isinstance(seen[-1].error, KeyboardInterrupt)


def test_a_call_in_a_call_is_one_of_its_own(model, seen):
    assistant = tiny_models.make("llama", num_hidden_layers=1)
    hfpaged.patch(assistant, default=True)
    try:
        model.generate(ids(), **{CACHE: PagedCache(model)}, assistant_model=assistant, **GREEDY)
    finally:
        hfpaged.unpatch(assistant)
    calls = {event.call for event in seen}
    outer = seen[0].call
    assert seen[-1].call is outer
    for call in calls:
        assert kinds([event for event in seen if event.call is call])[0] is GenerationBegan
    assert [event.forwards for event in seen if type(event) is GenerationEnded and event.call is outer] != [0]


def test_other_caches_are_not_told_of(model, seen):
    hfpaged.patch(model)
    model.generate(ids(), **GREEDY)
    model.generate(ids(), **{CACHE: DynamicCache()}, **GREEDY)
    assert seen == []
    hfpaged.patch(model, default=True)
    model.generate(ids(), **GREEDY, use_cache=False)
    model.generate(ids(), generation_config=GenerationConfig(**GREEDY, cache_implementation="static"))
    assert seen == []
    model.generate(ids(), **GREEDY)
    assert kinds(seen) == WHOLE


def test_windows_and_dense_models_are_told_of_as_well(seen):
    for name, options in (("llama", {"window": 16}), ("mistral", {}), ("falcon", {})):
        model = tiny_models.make(name)
        model.generate(ids(1, 40), **{CACHE: PagedCache(model, block_size=4, **options)}, **GREEDY)
        assert kinds(seen) == WHOLE, name
        hfpaged.unpatch(model)
        seen.clear()


def test_a_hook_that_raises_stops_nothing(model, caplog):
    def hook(event):
        raise RuntimeError("mine")

    generation_events.watch(hook)
    try:
        out = model.generate(ids(), **{CACHE: PagedCache(model)}, **GREEDY)
    finally:
        generation_events.unwatch(hook)
    assert out.shape == (1, 26)
    assert "a hook raised on GenerationBegan" in caplog.text


class Interrupting:
    def __init__(self, kind):
        self.kind = kind

    def __call__(self, event):
        if isinstance(event, self.kind):
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", WHOLE)
def test_ctrl_c_in_a_hook_is_raised_when_all_others_know(model, kind):
    events, interrupting = [], Interrupting(kind)
    hook = events.append
    generation_events.watch(interrupting)
    generation_events.watch(hook)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids(), **{CACHE: PagedCache(model)}, **GREEDY)
    finally:
        generation_events.unwatch(interrupting)
        generation_events.unwatch(hook)
    assert kinds(events) == [told for told in WHOLE if (kind, told) != (GenerationBegan, GenerationPrefilled)]


@pytest.mark.parametrize("made", [torch.tensor([1, 2, 3]), torch.tensor(3), "a text", None])
def test_whatever_a_custom_generate_gives_back_reaches_its_caller(model, seen, made):
    out = model.generate(ids(), **{CACHE: PagedCache(model)}, custom_generate=lambda *_, **__: made, **GREEDY)
    assert out is made
    assert kinds(seen) == [GenerationBegan, GenerationEnded]
    assert (seen[-1].output_tokens, seen[-1].error) == (0, None)


def test_an_output_that_cannot_be_counted_is_not_lost(model, seen, caplog):
    def generated(*_, **__):
        return torch.ones(1, 22, device="meta", dtype=torch.long)  # its numbers are nowhere

    cache = {CACHE: PagedCache(model)}
    out = model.generate(ids(), **cache, custom_generate=generated, eos_token_id=3, **GREEDY)
    assert out.shape == (1, 22)
    assert kinds(seen) == [GenerationBegan, GenerationEnded]
    assert "could not be watched (count_new_tokens)" in caplog.text


def test_bytes_times_seconds_are_those_of_the_forwards(model, seen, monkeypatch):
    clock = FakeClock(monkeypatch)
    cache = PagedCache(model, block_size=4)
    forward, used = model.forward, []

    def slow(*args, **kwargs):
        out = forward(*args, **kwargs)
        used.append(cache.pool.blocks.num_used)
        clock.time += 1
        return out

    monkeypatch.setattr(model, "forward", slow)
    model.generate(ids(1, 8), **{CACHE: cache}, max_new_tokens=17, min_new_tokens=17, do_sample=False)
    size = cache.pool.storage.block_bytes
    assert seen[-1].byte_seconds == pytest.approx(sum(used) * size)
    assert seen[-1].time - seen[0].time == 17


@pytest.mark.parametrize("broken", ["prompt_tokens", "count_new_tokens", "memory"])
def test_what_fails_in_watching_costs_nobody_his_output(model, seen, monkeypatch, caplog, broken):
    from hfpaged import generation_watch

    expected = model.generate(ids(), **{CACHE: PagedCache(model)}, **GREEDY)
    seen.clear()

    def fail(*args):
        raise RuntimeError("ours")

    place, name = (PagedCache, "look_at_memory") if broken == "memory" else (generation_watch, broken)
    monkeypatch.setattr(place, name, fail)
    assert torch.equal(model.generate(ids(), **{CACHE: PagedCache(model)}, **GREEDY), expected)
    assert "could not be watched" in caplog.text
    assert kinds(seen) == ([] if broken == "prompt_tokens" else WHOLE)
