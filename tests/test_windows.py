"""Models whose layers see a window: the tokens of transformers' own cache, in no more blocks than the window needs."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import tiny_models
import torch
from transformers import DynamicCache

import hfpaged
from hfpaged import attention, compat
from hfpaged.handle import LazyKV

CACHE = compat.cache_argument()
NEW = 30  # beyond every window, from before and from behind it
BOTH = pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
SLIDING = ["mistral", "gemma2", "gemma3_text", "gpt_oss"]
GEMMA3 = tiny_models.PLAIN | {
    "num_hidden_layers": 6,
    "sliding_window": 12,
    "query_pre_attn_scalar": 12,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
}


pytestmark = pytest.mark.usefixtures("one_thread")


def make(name, is_patched=False):
    tiny_models.TABLE.setdefault("gemma3_text", ("gemma3_text", GEMMA3))
    model = tiny_models.make(name)
    return hfpaged.patch(model) if is_patched else model


def paged(model, block_size=4, num_blocks=2000, **sizes):
    return hfpaged.PagedCache(config=model.config, block_size=block_size, num_blocks=num_blocks, **sizes)


def dynamic(model):
    return DynamicCache(config=model.config)


def generate(model, cache, inputs, new=8, **arguments):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **{CACHE: cache}, **arguments).tolist()


@torch.no_grad()
def forward(model, cache, ids, **arguments):
    return model(ids, **{CACHE: cache}, **arguments).logits


def random_ids(batch, length, seed=0):
    return tiny_models.prompts([length] * batch, seed)["input_ids"]


def assert_same_next(model, cache, other, ids):
    torch.testing.assert_close(forward(model, cache, ids), forward(model, other, ids), atol=1e-4, rtol=1e-4)


class Watch:
    """Block tables of a cache after each forward of a model, held against what windows allow."""

    def __init__(self, model, cache, is_patched):
        self.cache, self.is_patched, self.forwards = cache, is_patched, 0
        self.hook = model.register_forward_hook(self.look)

    def look(self, *_):
        self.forwards += 1
        rows = self.cache._rows
        self.cache.pool.check_integrity()
        for sequence in rows.sequences:
            for group, table in zip(self.cache.pool.groups, sequence.tables, strict=True):
                whole = -(-table.length // self.cache.pool.block_size)
                assert len(table.blocks) == whole - self.gone(table, group.window)

    def gone(self, table, window):
        """Blocks that must have been released by now."""
        if window is None:
            return 0
        rows = self.cache._rows
        new = 0 if self.is_patched else rows.length - rows.past_length  # padding stands on the left: tokens of the step
        return max(min(table.length, max(table.length - new, 0)) - window + 1, 0) // self.cache.pool.block_size


MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 7},
}


@BOTH
@pytest.mark.parametrize(("mode", "block_size"), [("greedy", 16), *((mode, 4) for mode in MODES)])
@pytest.mark.parametrize("name", SLIDING)
def test_a_long_text_gives_the_same_tokens_in_the_blocks_that_windows_need(name, mode, block_size, is_patched):
    model = make(name)
    inputs = tiny_models.prompts([31] if mode == "prompt_lookup" else [31, 9, 22])
    wanted = generate(model, dynamic(model), inputs, NEW, **MODES[mode])
    if is_patched:
        hfpaged.patch(model)
    cache, dense_before = paged(model, block_size), dict(attention.dense_calls)
    watch = Watch(model, cache, is_patched) if mode in ("greedy", "beams") else None
    assert generate(model, cache, inputs, NEW, **MODES[mode]) == wanted
    assert attention.dense_calls == dense_before
    assert watch is None or watch.forwards >= NEW  # more, where what rows share is computed before them
    groups, rows = cache.pool.groups, cache._rows
    most = sum(-(-rows.length // block_size) if g.window is None else -(-g.window // block_size) + 1 for g in groups)
    cache.crop(0)
    assert cache.stats().blocks_used <= rows.batch * most
    cache.pool.check_integrity()
    pool = cache.pool
    del cache, watch, rows
    model._forward_hooks.clear()
    assert pool.num_free == pool.num_blocks


@BOTH
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("length", [10, 11, 12, 13, 15, 16, 17, 23, 24, 25, 27, 28, 29, 47, 48, 49])
def test_every_length_around_window_and_block_goes_on_as_in_a_dynamic_cache(name, length, is_patched):
    model, reference = make(name, is_patched), make(name)
    cache, other = paged(model), dynamic(model)
    for ids in (random_ids(2, length), random_ids(2, 1, 1), random_ids(2, 3, 2), random_ids(2, 30, 3)):
        wanted = forward(reference, other, ids)
        torch.testing.assert_close(forward(model, cache, ids), wanted, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(cache.layers, other.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)
        cache.pool.check_integrity()


@BOTH
def test_a_pool_of_the_window_and_the_step_is_enough_for_any_length(is_patched):
    model = make("mistral")
    inputs = tiny_models.prompts([40])
    wanted = generate(model, dynamic(model), inputs, 60, prefill_chunk_size=8)
    if is_patched:
        hfpaged.patch(model)
    cache = paged(model, num_blocks=-(-(24 + 8) // 4) + 1)
    assert generate(model, cache, inputs, 60, prefill_chunk_size=8) == wanted


def test_a_long_prefill_gives_back_when_its_forward_ends():
    model = make("gemma2", is_patched=True)
    cache = paged(model)
    forward(model, cache, random_ids(1, 100))
    assert [len(table.blocks) for table in cache._rows.sequences[0].tables] == [25 - 89 // 4, 25]


@BOTH
@pytest.mark.parametrize("name", SLIDING)
def test_a_draft_that_is_refused_goes_back_to_before_the_window(name, is_patched):
    """Longer drafts than what is left of the window: all of what assisted decoding crops must still be there."""
    model = make(name)
    inputs = tiny_models.prompts([33])
    helper = tiny_models.make("llama_mqa")
    helper.generation_config.num_assistant_tokens, helper.generation_config.assistant_confidence_threshold = 14, 0.0
    wanted = generate(model, dynamic(model), inputs, 40)
    if is_patched:
        hfpaged.patch(model)
    cache = paged(model)
    assert generate(model, cache, inputs, 40, assistant_model=helper) == wanted
    cache.pool.check_integrity()


@BOTH
@pytest.mark.parametrize("removed", [0, 1, 5, 11, 24, 30])
def test_what_was_recorded_can_be_cropped_as_in_a_dynamic_cache(removed, is_patched):
    model = make("mistral", is_patched)
    cache, other = paged(model), dynamic(model)
    for each in (cache, other):
        each.activate_past_recording()
        forward(model, each, random_ids(2, 50))
    assert cache.stats().blocks_used == 2 * 13
    for each in (cache, other):
        each.crop(-removed)
    assert cache.stats().blocks_used == 2 * (-(-(50 - removed) // 4) - max(50 - removed - 23, 0) // 4)
    for seed in range(1, 4):
        assert_same_next(model, cache, other, random_ids(2, 2, seed))
        for each in (cache, other):
            each.crop(-1)
    assert all(layer.record_past for layer in cache.layers)
    cache.pool.check_integrity()


def test_who_stops_to_record_holds_nothing_back_any_more():
    """As generate() does before it returns a cache: layer by layer."""
    model = make("mistral", is_patched=True)
    cache = paged(model)
    cache.activate_past_recording()
    forward(model, cache, random_ids(1, 50))
    assert cache.is_recording_past(1)
    for layer in cache.layers:
        layer.record_past = False
    forward(model, cache, random_ids(1, 1))
    assert cache.stats().blocks_used == 13 - (51 - 23) // 4


@BOTH
def test_a_crop_too_far_back_is_refused_with_the_remedy_and_the_cache_goes_on(is_patched):
    model = make("gemma2", is_patched)
    cache, other = paged(model), dynamic(model)
    for ids in (random_ids(2, 30), random_ids(2, 1, 1)):
        for each in (cache, other):
            forward(model, each, ids)
    for error in (RuntimeError, ValueError, hfpaged.CacheMismatchError, hfpaged.WindowPassedError):
        with pytest.raises(error, match=r"cut to 20 tokens needs those from 9 on .* of 12, .*activate_past_recording"):
            cache.crop(-11)
    cache.pool.check_integrity()
    assert cache.get_seq_length() == 31
    assert_same_next(model, cache, other, random_ids(2, 2, 2))


@pytest.mark.parametrize("removed", [1, 2, 3])
def test_a_crop_inside_of_what_is_still_there_works_without_recording(removed):
    model = make("mistral", is_patched=True)
    cache, other = paged(model), dynamic(model)
    forward(model, cache, random_ids(1, 50))  # tokens from 24 on are held: 50 - 23 = 27 lies in their first block
    cache.crop(-removed)
    forward(model, other, random_ids(1, 50)[:, : 50 - removed])
    assert_same_next(model, cache, other, random_ids(1, 3, 1))
    cache.crop(-100)
    assert cache.pool.num_free == cache.pool.num_blocks
    assert_same_next(model, cache, dynamic(model), random_ids(2, 30, 1))


class Break(Exception):
    pass


@BOTH
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_forward_that_fails_leaves_what_the_next_one_sees(layer, is_patched):
    model, reference = make("gemma2", is_patched), make("gemma2")
    cache, other = paged(model), dynamic(model)
    for seed, length in enumerate((29, 1, 1, 1, 1, 9, 1)):
        broken = model.model.layers[layer].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Break))
        with pytest.raises(Break):
            forward(model, cache, random_ids(2, 1 + 3 * seed, 9))
        broken.remove()
        if not is_patched:
            cache.abort_step()
        cache.pool.check_integrity()
        ids = random_ids(2, length, seed)
        torch.testing.assert_close(forward(model, cache, ids), forward(reference, other, ids), atol=1e-4, rtol=1e-4)


@BOTH
def test_copies_share_what_they_hold_and_give_back_for_themselves(is_patched):
    model, reference = make("gemma2", is_patched), make("gemma2")
    cache, other = paged(model), dynamic(model)
    for ids in (random_ids(2, 30), random_ids(2, 1, 1)):
        for each, by in ((cache, model), (other, reference)):
            forward(by, each, ids)
    used = cache.stats().blocks_used
    fork, other_fork = copy.deepcopy(cache), copy.deepcopy(other)
    assert cache.stats().blocks_used == used
    for seed in range(20):
        for ours, theirs in ((cache, other), (fork, other_fork)):
            ids = random_ids(2, 1, seed + 100 * (ours is fork))
            wanted = forward(reference, theirs, ids)
            torch.testing.assert_close(forward(model, ours, ids), wanted, atol=1e-4, rtol=1e-4)
            cache.pool.check_integrity()
    pool = cache.pool
    del cache, ours
    fork.free()
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("change", ["batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
def test_rows_change_behind_a_window_as_in_a_dynamic_cache(change):
    model, reference = make("mistral", is_patched=True), make("mistral")
    inputs = tiny_models.prompts([40, 9, 33])
    mask = inputs["attention_mask"]
    cache, other = paged(model), dynamic(model)
    for each, by in ((cache, model), (other, reference)):
        forward(by, each, ids=inputs["input_ids"], attention_mask=mask)
        getattr(each, change)(2 if change == "batch_repeat_interleave" else torch.tensor([2, 1, 2]))
    mask = mask.repeat_interleave(2, 0) if change == "batch_repeat_interleave" else mask[[2, 1, 2]]
    for seed in range(6):
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], dim=1)
        ids = random_ids(len(mask), 1, seed)
        wanted = forward(reference, other, ids, attention_mask=mask)
        ours = forward(model, cache, ids, attention_mask=mask)
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
        cache.pool.check_integrity()


def test_stats_count_what_is_held():
    model = make("gemma2", is_patched=True)
    cache = paged(model)
    forward(model, cache, random_ids(1, 100))
    stats = cache.stats()
    per_token = 2 * 2 * 12 * 4  # key and value of 2 heads of 12 float32
    assert stats.blocks_used == 25 + 3
    assert stats.bytes_live == (2 * 100 + 2 * (100 - 88)) * per_token
    assert stats.tokens == (100 + 12) // 2
    assert stats.waste_ratio == 0.0


def test_groups_of_different_sizes_count_their_own_bytes():
    model = make("gemma3_text", is_patched=True)
    cache = paged(model)
    assert sorted(len(group.layers) for group in cache.pool.groups) == [2, 2, 2]
    forward(model, cache, random_ids(1, 99))
    assert cache.stats().bytes_live == (2 * 99 + 4 * (99 - 88)) * 2 * 2 * 12 * 4


@pytest.mark.parametrize("window", [5, 12, None])
def test_a_mask_that_sees_more_than_the_window_of_the_cache_takes_the_dense_view(window):
    """A cache made for a smaller window shows what transformers' own would show, never what a block holds by chance."""
    model = tiny_models.make("mistral", sliding_window=window)
    narrow = tiny_models.make("mistral", sliding_window=7).config
    reference = tiny_models.make("mistral", sliding_window=window)
    hfpaged.patch(model)
    cache = hfpaged.PagedCache(config=narrow, block_size=4, num_blocks=100)
    other = DynamicCache(config=narrow)
    before = sum(attention.dense_calls.values())
    for seed, length in enumerate((3, 15, 1, 1, 4)):
        ids = random_ids(2, length, seed)
        torch.testing.assert_close(forward(model, cache, ids), forward(reference, other, ids), atol=1e-4, rtol=1e-4)
    assert (sum(attention.dense_calls.values()) > before) == (window != 5)


def test_keys_read_after_their_forward_are_refused_once_their_blocks_may_be_anothers():
    model = make("gemma2")
    cache, kept = paged(model), []
    update = cache.update

    def noted(*args, **kwargs):
        kept.append(update(*args, **kwargs))
        return kept[-1]

    cache.update = noted
    forward(model, cache, random_ids(1, 20))
    forward(model, cache, random_ids(1, 1))
    kept.clear()
    hfpaged.patch(model)
    forward(model, cache, random_ids(1, 1))
    assert all(isinstance(key, LazyKV) for key, _ in kept)
    full = [index for index, layer in enumerate(cache.layers) if not layer.is_sliding]
    for index, (key, _) in enumerate(kept):
        if index in full:
            torch.testing.assert_close(key + 0, cache.layers[index].keys)
        else:
            with pytest.raises(hfpaged.CacheMismatchError, match="22 positions of a layer with a window of 12"):
                key + 0


# Name of the case -> lengths of the prompts, new tokens, arguments of generate().
DEMO_CASES = {
    "greedy": ([300], 24, {}),
    "short_prompt": ([235], 40, {}),
    "padded": ([290, 120, 245], 24, {}),
    "beams": ([270], 12, {"num_beams": 3}),
    "prompt_lookup": ([280], 40, {"prompt_lookup_num_tokens": 5}),
}


@pytest.mark.demo_model
class TestDemoMistral:
    """The demo model's weights as a Mistral with a window of 256 tokens."""

    TEXT = "The sea was calm, and the old man counted the boats that came back one by one before the storm. " * 15

    wanted: ClassVar[dict[str, list[list[int]]]] = {}  # by case, with a DynamicCache

    def inputs(self, tokenizer, lengths):
        ids = tokenizer(self.TEXT, return_tensors="pt")["input_ids"][0]
        mask = torch.ones(len(lengths), max(lengths), dtype=torch.long)
        rows = torch.full_like(mask, tokenizer.pad_token_id)
        for row, length in enumerate(lengths):
            mask[row, : max(lengths) - length] = 0
            rows[row, max(lengths) - length :] = ids[row : row + length]
        return {"input_ids": rows, "attention_mask": mask}

    @BOTH
    @pytest.mark.parametrize("case", DEMO_CASES)
    def test_generates_what_it_does_with_a_dynamic_cache(self, demo_mistral, case, is_patched):
        model, tokenizer = demo_mistral
        lengths, new, arguments = DEMO_CASES[case]
        inputs = self.inputs(tokenizer, lengths)
        if case not in self.wanted:
            self.wanted[case] = generate(model, dynamic(model), inputs, new, **arguments)
        cache = paged(model, block_size=16)
        try:
            if is_patched:
                hfpaged.patch(model)
            assert generate(model, cache, inputs, new, **arguments) == self.wanted[case]
        finally:
            hfpaged.unpatch(model)
        cache.crop(0)
        cache.pool.check_integrity()
        for sequence in cache._rows.sequences:
            (table,) = sequence.tables
            assert len(table.blocks) == -(-table.length // 16) - max(table.length - 255, 0) // 16 <= 256 // 16 + 1

    def test_has_the_tensors_of_the_demo_model_and_sees_a_window(self, demo, demo_mistral):
        theirs, ours = demo[0].state_dict(), demo_mistral[0].state_dict()
        assert theirs.keys() == ours.keys()
        assert all(theirs[name].data_ptr() == ours[name].data_ptr() for name in theirs)
        ids = self.inputs(demo_mistral[1], [256])["input_ids"]
        with torch.no_grad():
            short = [model(ids[:, :256]).logits for model in (demo[0], demo_mistral[0])]
        torch.testing.assert_close(*short, atol=1e-3, rtol=1e-3)
        assert dynamic(demo_mistral[0]).layers[0].sliding_window == 256
