"""Models with layers that keep more than keys and values: the state goes where its sequence goes."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from family_models import build
from test_batcher_families import alone as greedy_alone
from test_batcher_families import prompts
from test_batcher_tokens import alone, without_padding
from transformers import DynamicCache

import hfpaged
from hfpaged import ContinuousBatcher
from hfpaged.compat import cache_argument
from hfpaged.engine import events as ev
from hfpaged.engine import limits
from hfpaged.engine.block_needs import BlockNeeds
from hfpaged.errors import OutOfBlocksError, UnsupportedModelError
from hfpaged.layer_states import LayerStates
from hfpaged.packed_cache import PackedCache
from hfpaged.prepack import is_prepacked

# Attention and a state in one layer, in turns, with windows, with indexers; those that take a prompt only whole.
NAMES = ["falcon_h1", "lfm2", "qwen3_next", "inkling_text", "deepseek_v32", "zaya", "jamba", "zamba"]
WHOLE = ["jamba", "zamba"]
LENGTHS = (5, 17, 9, 33)
NEW = 8


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def shared(name):
    return build(name)


@functools.cache
def expected(name):
    return [alone(shared(name), prompt, max_new_tokens=NEW)[0] for prompt in prompts(LENGTHS)]


def batcher_of(name, **sizes):
    given = {"block_size": 4, "num_blocks": 600, "max_num_batched_tokens": 64, "max_num_seqs": 16, "prepack": False}
    return ContinuousBatcher(shared(name), **given | sizes)


def checked(batcher):
    """All is given back."""
    batcher.pool.check_integrity()
    assert batcher.pool.num_free == batcher.pool.num_blocks
    batcher.close()
    hfpaged.unpatch(batcher.model)


def num_states():
    gc.collect()
    return sum(type(each) is LayerStates for each in gc.get_objects())


SIZES = {
    "at once": {},
    "in chunks, where it can": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 22, "max_num_batched_tokens": 128},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate_alone(name, sizes):
    wanted, events = expected(name), []
    batcher = batcher_of(name, hooks=(events.append,), **sizes)
    outputs = batcher.generate(prompts(LENGTHS), max_new_tokens=NEW, do_sample=False)
    assert [output.token_ids for output in outputs] == wanted
    # Inkling has tables with windows, whose blocks are counted in advance: its requests wait instead.
    is_short = "num_blocks" in sizes and name != "inkling_text"
    assert any(type(event) is ev.Preempted for event in events) == is_short
    told = batcher.describe()
    assert told["forward"] == "one by one (layers with a state beside keys and values)"
    assert told["prompts"] == ("whole" if name in WHOLE else "in chunks")
    assert not told["prefix_sharing"]
    checked(batcher)


@pytest.mark.parametrize("blocks", [600, 20], ids=["room", "preempted"])
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "deepseek_v32", "jamba"])
def test_beams_take_their_states_along(name, blocks):
    mode, given = {"num_beams": 4, "num_return_sequences": 2}, prompts((5, 6, 7))
    wanted = [alone(shared(name), prompt, max_new_tokens=NEW, **mode) for prompt in given]
    events = []
    batcher = batcher_of(name, num_blocks=blocks, hooks=(events.append,))
    outputs = batcher.generate(given, max_new_tokens=NEW, do_sample=False, **mode)
    assert [[without_padding(s.token_ids) for s in o.sequences] for o in outputs] == [
        [without_padding(row) for row in rows] for rows in wanted
    ]
    assert any(type(event) is ev.Preempted for event in events) == (blocks == 20)
    checked(batcher)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_one_prompt_go_on_apart(name):
    """The first is what generate() samples alone; of all, the logits are those behind their own tokens."""
    sampled = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.3, "seed": 5, "n": 4, "logprobs": 0}
    (prompt,) = prompts((9,))
    torch.manual_seed(5)
    first = alone(shared(name), prompt, max_new_tokens=NEW, do_sample=True, temperature=1.3)[0]
    batcher = batcher_of(name)
    output = batcher.generate(prompt, **sampled)[0]
    assert output.sequences[0].token_ids == first
    assert output.metrics.computed_tokens == len(prompt) + 4 * (NEW - 1)
    assert len({tuple(seq.token_ids) for seq in output.sequences}) == 4
    for seq in output.sequences:
        given = torch.tensor([position.logprob for position in seq.logprobs])
        wanted = _logprobs(shared(name), prompt, seq.token_ids)
        torch.testing.assert_close(given, wanted, atol=1e-3, rtol=1e-3)
    checked(batcher)


def _logprobs(model, prompt, tokens):
    """Of each of the tokens, one after the other behind the prompt, with transformers' own cache."""
    cache, given, found = DynamicCache(config=model.config), prompt, []
    for token in tokens:
        with torch.no_grad():
            logits = model(torch.tensor([given]), use_cache=True, **{cache_argument(): cache}).logits[0, -1]
        found.append(logits.log_softmax(-1)[token])
        given = [token]
    return torch.stack(found)


def test_a_prompt_that_cannot_be_cut_is_alone_in_its_step_and_none_is_split():
    steps = []
    batcher = batcher_of("jamba", max_num_batched_tokens=12, max_num_seqs=8)
    batcher.hooks.append(lambda event: steps.append(event) if type(event) is ev.StepFinished else None)
    batcher.generate(prompts((5, 33, 4, 3, 20)), max_new_tokens=2, do_sample=False)
    assert [step.num_prefill_tokens for step in steps if step.num_prefill_tokens] == [5, 33, 7, 20]
    checked(batcher)


def test_a_long_prompt_that_can_be_cut_is():
    steps = []
    batcher = batcher_of("falcon_h1", max_num_batched_tokens=12, max_num_seqs=8)
    batcher.hooks.append(lambda event: steps.append(event) if type(event) is ev.StepFinished else None)
    batcher.generate(prompts((33,)), max_new_tokens=2, do_sample=False)
    assert [step.num_prefill_tokens for step in steps if step.num_prefill_tokens] == [12, 12, 9]
    checked(batcher)


def test_needs_of_prompts_that_come_whole_count_what_windows_hold_then():
    chunked, whole = (BlockNeeds((None, 6), 4, chunk) for chunk in (8, None))
    assert chunked.at_most(40, 8) == 12 + 5
    assert whole.at_most(40, 8) == 12 + 12


def test_guesses_are_not_made_for_layers_that_cannot_go_back():
    batcher = batcher_of("lfm2")
    (prompt,) = prompts((9,))
    wanted = alone(shared("lfm2"), prompt * 3, max_new_tokens=NEW)[0]
    output = batcher.generate(prompt * 3, max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=4)[0]
    assert output.token_ids == wanted
    assert output.metrics.draft_tokens == 0
    checked(batcher)


@pytest.mark.parametrize("name", ["falcon_h1", "jamba"])
def test_a_forward_that_was_broken_in_its_middle_is_made_anew(name, monkeypatch):
    wanted = expected(name)
    batcher = batcher_of(name)
    ids = [batcher.add_request(p, max_new_tokens=NEW, do_sample=False) for p in prompts(LENGTHS)]
    finals, calls = {}, []
    begin = PackedCache.begin

    def interrupted(self, growth):
        calls.append(1)
        if len(calls) == 11:  # in the third step, when two of four have gone on
            raise OutOfBlocksError(1, 0, 1)
        return begin(self, growth)

    monkeypatch.setattr(PackedCache, "begin", interrupted)
    handle = shared(name).lm_head.register_forward_pre_hook(lambda *given: _interrupt(len(calls) == 22))
    for _ in range(40):
        try:
            finals |= {output.request_id: output for output in batcher.step() if output.finished}
        except KeyboardInterrupt:
            batcher.pool.check_integrity()
            calls.append(1)
    handle.remove()
    assert [finals[request_id].token_ids for request_id in ids] == wanted
    assert len(calls) > 22
    assert finals[ids[0]].metrics.computed_tokens > LENGTHS[0] + NEW - 1  # some of it twice
    checked(batcher)


def _interrupt(now):
    if now:
        raise KeyboardInterrupt


def test_an_error_fails_its_step_and_leaves_no_state_to_the_next_one():
    batcher = batcher_of("falcon_h1")
    fault = ValueError("broken")

    def broken(*given):
        raise fault

    handle = shared("falcon_h1").lm_head.register_forward_pre_hook(broken)
    outputs = batcher.generate(prompts(LENGTHS), max_new_tokens=NEW, do_sample=False)
    handle.remove()
    assert [output.error for output in outputs] == [fault] * len(LENGTHS)
    outputs = batcher.generate(prompts(LENGTHS), max_new_tokens=NEW, do_sample=False)
    assert [output.token_ids for output in outputs] == expected("falcon_h1")
    checked(batcher)


def test_an_abort_drops_the_state_with_the_blocks():
    batcher = batcher_of("falcon_h1")
    before = num_states()
    batcher.generate(prompts(LENGTHS), max_new_tokens=NEW, do_sample=False, n=1)
    assert num_states() == before
    request = batcher.add_request(prompts()[0], max_new_tokens=NEW)
    batcher.step()
    assert num_states() == before + 1
    batcher.abort(request)
    batcher.step()
    assert num_states() == before
    checked(batcher)


def test_states_are_shared_until_one_goes_on_and_counted():
    layer = torch.nn.Module()
    layer.conv_states = {0: torch.zeros(3, dtype=torch.float64)}
    first = LayerStates({1: layer})
    assert first.num_bytes == 24
    second, third = first.fork(), first.fork()
    assert second.own()[1] is not layer
    second.own()[1].conv_states[0] += 1
    assert third.own()[1] is not layer
    assert first.own()[1] is layer  # the last one that has it need not copy it
    assert layer.conv_states[0].tolist() == [0, 0, 0]
    fourth = first.fork()
    first.drop()
    assert fourth.own()[1] is layer


def test_what_states_take_is_left_out_of_the_pool():
    batcher = ContinuousBatcher(shared("falcon_h1"), memory=0.3, prepack=False, max_num_seqs=7)
    states = batcher._parts.sizing.states
    assert states > 0
    assert states % 7 == 0
    assert "for the states of sequences" in batcher.describe()["sizing"]
    checked(batcher)


REFUSED = {
    "recurrent_gemma": "keeps a state of the sequence in its own modules",
    "musicgen": "RuntimeError: shape",
    "cpmant": r"brings 3\d positions",
    "xlm": "plain tokens",
}


@pytest.mark.parametrize("sizes", [{"num_blocks": 100}, {"memory": 0.3}], ids=["blocks", "share"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_and_the_weights_lie_as_before(name, sizes):
    model = shared(name)
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        ContinuousBatcher(model, prepack=True, **sizes)
    assert not is_prepacked(model)
    hfpaged.unpatch(model)


def test_a_cache_that_was_freed_serves_mllama_again():
    """It asks each layer that says that it has keys for them."""
    model = shared("mllama")
    prompt = prompts()[0]
    cache = hfpaged.PagedCache(model, num_blocks=50)
    ids = torch.tensor([prompt])
    wanted = greedy_alone(model, prompt)
    for _ in range(2):
        out = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
        assert out[0, len(prompt) :].tolist() == wanted
        cache.free()
    hfpaged.unpatch(model)


@pytest.mark.parametrize("name", [WHOLE[0], "lfm2"])
def test_the_logits_of_a_long_prompt_are_seen_whether_or_not_it_may_be_cut(name, monkeypatch):
    monkeypatch.setattr(limits, "PROMPT_LOGITS", 4)
    batcher = batcher_of(name)
    prompt = list(range(3, 16))
    batcher.add_request(prompt, max_new_tokens=2, do_sample=False, prompt_logprobs=0)
    outputs = [output for _ in range(12) for output in batcher.step() if output.finished]
    assert [output.finish_reason for output in outputs] == ["length"]
    (output,) = outputs
    ids = torch.tensor([prompt])
    with torch.no_grad():
        expected = torch.log_softmax(batcher.model(ids).logits[0].float(), dim=-1)
    for position in range(1, len(prompt)):
        found = output.prompt_logprobs[position]
        assert found.token_id == prompt[position]
        assert abs(found.logprob - expected[position - 1, prompt[position]].item()) < 1e-3
    batcher.close()
