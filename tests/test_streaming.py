"""PagedCache(model, window=, sinks=): what StreamingLLM says, held against an own writing-down of its rule."""

from __future__ import annotations

import copy

import family_models
import pytest
import tiny_models
import torch
from streaming import CACHE, as_in_the_paper, paper_cache, paper_logits
from transformers import DynamicCache

import hfpaged
from hfpaged import attention
from hfpaged.bench.texts import PARAGRAPHS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_dense_view():
    before = dict(attention.dense_calls)
    yield
    assert attention.dense_calls == before


def streaming(model, window=32, sinks=4, block_size=16, num_blocks=500, **arguments):
    return hfpaged.PagedCache(
        model, window=window, sinks=sinks, block_size=block_size, num_blocks=num_blocks, **arguments
    )


def generate(model, cache, inputs, new, **arguments):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, **{CACHE: cache}, **arguments)


@torch.no_grad()
def forward(model, cache, ids, **arguments):
    return model(ids, **{CACHE: cache}, **arguments).logits


def random_ids(batch, length, seed=0):
    return tiny_models.prompts([length] * batch, seed)["input_ids"]


def pieces_of(prompt, window, sinks, block_size):
    """In what pieces a prompt is computed: what is seen whole, then a quarter of the window in blocks."""
    whole = window + -(-sinks // block_size) * block_size
    chunk = max(window // 4 // block_size, 1) * block_size
    pieces = [min(prompt, whole)]
    while sum(pieces) < prompt:
        pieces.append(min(chunk, prompt - sum(pieces)))
    return pieces


# Model, its own changes, window, sinks, block_size.
PAPER_CASES = {
    "llama": ("llama", {}, 32, 4, 16),
    "qwen3": ("qwen3", {}, 32, 4, 16),
    "gemma2_own_windows_beside": ("gemma2", {}, 32, 4, 16),
    "gpt_oss_learnt_sinks_beside": ("gpt_oss", {}, 32, 4, 16),
    "gpt_neox_rotates_a_part": ("gpt_neox", {}, 32, 4, 16),
    "mistral_window_above_ours": ("mistral", {"sliding_window": 100}, 24, 4, 4),
    "two_blocks_of_sinks": ("llama", {}, 24, 6, 4),
    "no_sinks": ("llama", {}, 32, 0, 16),
    "window_within_a_block": ("llama", {}, 5, 3, 16),
    "one_token": ("llama", {}, 1, 1, 1),
    "window_of_no_power": ("qwen3", {}, 37, 9, 8),
}


@pytest.mark.parametrize(("prompt", "new"), [(1, 100), (40, 130), (150, 40)])
@pytest.mark.parametrize("case", PAPER_CASES)
def test_a_long_text_gives_the_tokens_and_logits_of_the_paper(case, prompt, new, monkeypatch):
    name, changes, window, sinks, block_size = PAPER_CASES[case]
    model, ids = tiny_models.make(name, **changes), random_ids(1, prompt)
    cache = streaming(model, window, sinks, block_size)
    ours = generate(model, cache, {"input_ids": ids}, new, return_dict_in_generate=True, output_logits=True)
    cache.pool.check_integrity()
    reference = as_in_the_paper(tiny_models.make(name, **changes), monkeypatch, window)
    pieces = pieces_of(prompt, window, sinks, block_size)
    theirs = paper_logits(
        reference,
        paper_cache(reference, window, sinks, block_size),
        ours.sequences[:, :-1],
        [*pieces, *[1] * (new - 1)],
    )[len(pieces) - 1 :]
    torch.testing.assert_close(torch.cat(ours.logits), theirs, atol=2e-4, rtol=2e-4)
    assert ours.sequences[0, prompt:].tolist() == theirs.argmax(dim=-1).tolist()


MODES = {
    "several_rows": ({"num_return_sequences": 3, "num_beams": 3}, 40),
    "beams": ({"num_beams": 3}, 40),
    "prompt_lookup": ({"prompt_lookup_num_tokens": 3}, 40),
    "pieces": ({"prefill_chunk_size": 16}, 150),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_way_to_generate_gives_what_it_gives_with_the_rule_of_the_paper(name, mode, monkeypatch):
    arguments, prompt = MODES[mode]
    model, ids = tiny_models.make(name), random_ids(1, prompt)
    cache = streaming(model)
    ours = generate(model, cache, {"input_ids": ids}, 90, **arguments).tolist()
    cache.pool.check_integrity()
    assert cache.stats().blocks_used <= cache._rows.batch * (1 + 4) * 2
    reference = as_in_the_paper(tiny_models.make(name), monkeypatch, 32)
    assert ours == generate(reference, paper_cache(reference, 32, 4, 16), {"input_ids": ids}, 90, **arguments).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_chat_goes_on_over_many_calls_of_generate(name, monkeypatch):
    model, turns = tiny_models.make(name), [random_ids(1, 10, seed) for seed in range(8)]

    def chat(model, cache):
        text = torch.empty(1, 0, dtype=torch.long)
        for turn in turns:
            text = torch.cat([text, turn], dim=1)
            text = generate(model, cache, {"input_ids": text, "attention_mask": torch.ones_like(text)}, 15)
        return text.tolist()

    cache = streaming(model)
    ours = chat(model, cache)
    assert cache.get_seq_length() == len(ours[0]) - 1 == 199
    reference = as_in_the_paper(tiny_models.make(name), monkeypatch, 32)
    assert ours == chat(reference, paper_cache(reference, 32, 4, 16))


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_up_to_sinks_and_window_nothing_differs_from_a_dynamic_cache(name, arguments):
    model, inputs = tiny_models.make(name), tiny_models.prompts([30, 9, 22])
    wanted = generate(model, DynamicCache(config=model.config), inputs, 19, **arguments).tolist()  # 48 = 16 + 32
    assert generate(model, streaming(model), inputs, 19, **arguments).tolist() == wanted


def test_rows_of_a_padded_batch_go_on_as_if_each_were_alone():
    model, inputs = tiny_models.make("llama"), tiny_models.prompts([48, 9, 22])
    together = generate(model, streaming(model), inputs, 100).tolist()
    for row, length in zip(range(3), (48, 9, 22), strict=True):
        alone = generate(model, streaming(model), {"input_ids": inputs["input_ids"][row : row + 1, -length:]}, 100)
        assert together[row][-100:] == alone[0, -100:].tolist()


def test_six_hundred_tokens_need_no_more_memory_than_a_hundred():
    model = tiny_models.make("llama")
    cache, seen, size = streaming(model), [], []

    def look(*_):
        seen.append(cache.stats().blocks_used)
        size.append(cache.pool.storage.nbytes)

    hook = model.register_forward_hook(look)
    generate(model, cache, {"input_ids": random_ids(1, 40)}, 600)
    hook.remove()
    assert max(seen) == max(seen[:100]) == cache.pool.blocks.high_water == 1 + 3
    assert max(size) == size[100]
    assert cache.get_seq_length() == 639
    cache.pool.check_integrity()
    assert model._forward_pre_hooks  # still patched
    cache.free()
    assert cache.pool.num_free == cache.pool.num_blocks


def test_a_pool_of_sinks_window_and_one_block_is_enough_for_any_length():
    model = tiny_models.make("llama")
    ids = random_ids(1, 40)
    wanted = generate(model, streaming(model), {"input_ids": ids}, 100).tolist()
    assert generate(model, streaming(model, num_blocks=4), {"input_ids": ids}, 100).tolist() == wanted


def test_without_sinks_in_blocks_of_one_token_a_llama_is_a_mistral():
    llama, mistral = tiny_models.make("llama"), tiny_models.make("mistral", sliding_window=24)
    mistral.load_state_dict(llama.state_dict())
    inputs = tiny_models.prompts([20, 9, 22])
    wanted = generate(mistral, DynamicCache(config=mistral.config), inputs, 120).tolist()
    assert generate(llama, streaming(llama, 24, 0, 1), inputs, 120).tolist() == wanted


def test_a_window_that_no_layer_exceeds_changes_nothing():
    model = tiny_models.make("mistral")
    cache = streaming(model, window=24)
    assert cache._rows.rules is None
    inputs = tiny_models.prompts([40, 9])
    wanted = generate(model, DynamicCache(config=model.config), inputs, 60).tolist()
    assert generate(model, cache, inputs, 60).tolist() == wanted


def grown(model, length=100, **sizes):
    """A cache that has forgotten something."""
    cache = streaming(model, **sizes)
    for part in random_ids(2, length).split(16, dim=1):
        forward(model, cache, part)
    return cache


def test_copies_share_what_they_hold_and_forget_for_themselves():
    model = tiny_models.make("gemma2")
    cache, other = grown(model), grown(model)
    used = cache.stats().blocks_used
    fork, pool = copy.deepcopy(cache), cache.pool
    assert cache.stats().blocks_used == used
    for seed in range(40):
        ids = random_ids(2, 1, seed)
        torch.testing.assert_close(forward(model, fork, ids), forward(model, other, ids), atol=1e-5, rtol=1e-5)
        forward(model, cache, random_ids(2, 1, seed + 100))
        pool.check_integrity()
    del cache
    fork.free()
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("change", ["batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
def test_rows_change_and_take_their_sinks_along(change):
    model = tiny_models.make("llama")
    cache, other = grown(model), grown(model)
    getattr(cache, change)(2 if change == "batch_repeat_interleave" else torch.tensor([1, 0, 1]))
    rows = [0, 0, 1, 1] if change == "batch_repeat_interleave" else [1, 0, 1]
    for seed in range(40):
        ids = random_ids(2, 1, seed)
        wanted = forward(model, other, ids)[rows]
        torch.testing.assert_close(forward(model, cache, ids[rows]), wanted, atol=1e-4, rtol=1e-4)
        cache.pool.check_integrity()
    assert cache.stats().blocks_shared == len(set(rows)) - (change != "batch_repeat_interleave")  # equal rows' sinks


def test_nothing_is_shared_with_others_but_the_pool():
    model = tiny_models.make("llama")
    inputs = {"input_ids": random_ids(1, 100)}
    plain = hfpaged.PagedCache(model, num_blocks=500)
    wanted = generate(model, plain, inputs, 10).tolist()
    published = len(plain.pool.blocks.published())
    cache = hfpaged.PagedCache(model, pool=plain.pool, window=32, sinks=4)
    first = generate(model, cache, inputs, 40).tolist()
    assert first == generate(model, streaming(model), inputs, 40).tolist()
    assert len(plain.pool.blocks.published()) == published
    queries = plain.stats().prefix_queries
    assert generate(model, hfpaged.PagedCache(model, pool=plain.pool), inputs, 10).tolist() == wanted
    assert plain.stats().prefix_queries == queries + 100
    plain.pool.check_integrity()


@pytest.mark.parametrize("removed", [1, 5, 16])
def test_a_crop_within_the_last_forward_goes_back_to_before_it(removed):
    model = tiny_models.make("llama")
    cache, other = grown(model, 96), grown(model, 96)
    forward(model, cache, random_ids(2, 16, 7))
    if removed < 16:
        forward(model, other, random_ids(2, 16, 7)[:, : 16 - removed])
    cache.crop(-removed)
    assert cache.get_seq_length() == other.get_seq_length()
    for seed in range(30):
        ids = random_ids(2, 1, seed)
        torch.testing.assert_close(forward(model, cache, ids), forward(model, other, ids), atol=1e-5, rtol=1e-5)
        cache.pool.check_integrity()


def test_a_crop_to_what_is_forgotten_is_refused_and_the_cache_goes_on():
    model = tiny_models.make("llama")
    cache, other = grown(model), grown(model)
    for error in (hfpaged.StreamPassedError, hfpaged.WindowPassedError):
        with pytest.raises(
            error, match=r"cut to 60 tokens needs the last 32 .* before position 64 have been forgotten"
        ):
            cache.crop(-40)
    cache.pool.check_integrity()
    ids = random_ids(2, 1, 5)
    torch.testing.assert_close(forward(model, cache, ids), forward(model, other, ids), atol=1e-5, rtol=1e-5)
    cache.crop(-1000)
    assert cache.pool.num_free == cache.pool.num_blocks
    ids = random_ids(1, 60, 6)
    torch.testing.assert_close(forward(model, cache, ids[:, :40]), forward(model, streaming(model), ids[:, :40]))


def test_sinks_that_were_cropped_before_anything_was_forgotten_are_learnt_anew():
    model = tiny_models.make("llama")
    cache, ids = streaming(model), random_ids(1, 100, 3)
    forward(model, cache, random_ids(1, 30))
    cache.crop(-22)
    other, text = streaming(model), torch.cat([random_ids(1, 30)[:, :8], ids], dim=1)
    forward(model, other, text[:, :8])
    for start in range(8, 108):
        ours, theirs = (forward(model, each, text[:, start : start + 1]) for each in (cache, other))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


class Break(Exception):
    pass


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_forward_that_fails_leaves_what_the_next_one_sees(layer):
    model = tiny_models.make("gemma2")
    cache, other = grown(model), grown(model)
    for seed in range(40):
        broken = model.model.layers[layer].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Break))
        with pytest.raises(Break):  # every 16 steps in the forward of the sinks
            forward(model, cache, random_ids(2, 1 + seed % 9, 9))
        broken.remove()
        cache.pool.check_integrity()
        ids = random_ids(2, 1, seed)
        torch.testing.assert_close(forward(model, cache, ids), forward(model, other, ids), atol=1e-5, rtol=1e-5)


def test_a_long_prompt_that_fails_in_one_of_its_pieces_leaves_an_empty_cache():
    model = tiny_models.make("llama")
    inputs = {"input_ids": random_ids(1, 150)}
    wanted = generate(model, streaming(model), inputs, 10).tolist()
    cache, calls = streaming(model), []

    def fail_late(*_):
        calls.append(1)
        if len(calls) == 4:
            raise Break

    broken = model.model.layers[1].mlp.register_forward_pre_hook(fail_late)
    with pytest.raises(Break):
        generate(model, cache, inputs, 10)
    broken.remove()
    assert cache.get_seq_length() == 0
    assert cache.pool.num_free == cache.pool.num_blocks
    assert generate(model, cache, inputs, 10).tolist() == wanted


def test_a_pool_without_room_for_the_sinks_is_told_and_the_cache_goes_on():
    model = tiny_models.make("llama")
    cache, other = streaming(model, num_blocks=9), streaming(model)
    text = random_ids(1, 90)
    for start in range(63):
        forward(model, cache, text[:, start : start + 1])
        forward(model, other, text[:, start : start + 1])
    hog = copy.deepcopy(cache)  # holds on to the block that the cache lets go of
    taken = cache.pool.blocks.allocate(cache.pool.num_free)
    with pytest.raises(hfpaged.OutOfBlocksError):
        forward(model, cache, text[:, 63:64])
    assert cache.get_seq_length() == 63
    del hog
    for block in taken:
        cache.pool.blocks.release(block)
    for start in range(63, 90):
        ours, theirs = (forward(model, each, text[:, start : start + 1]) for each in (cache, other))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    cache.pool.check_integrity()


REFUSED = {
    "gpt2": ("gpt2", 4, "rotary positions; use sinks=0"),
    "opt": ("opt", 4, "rotary positions; use sinks=0"),
    "bloom": ("bloom", 0, "attention has code of its own"),
    "falcon": ("falcon", 0, "attention has code of its own"),
    "latent": ("deepseek_v3", 0, "attention has code of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_whose_keys_cannot_be_forgotten_or_moved_are_refused(case):
    name, sinks, why = REFUSED[case]
    model = tiny_models.make(name)
    with pytest.raises(
        hfpaged.UnsupportedModelError, match=rf"{type(model).__name__} .*window=32, sinks={sinks}: .*{why}"
    ):
        streaming(model, sinks=sinks)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_length_are_refused(kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 256}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6} if kind == "longrope" else {}
    model = tiny_models.make("llama", rope_parameters=rope)
    with pytest.raises(hfpaged.UnsupportedModelError, match="change with the length of the text"):
        streaming(model, sinks=0)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learnt_positions_stream_without_sinks(name):
    model = tiny_models.make(name)
    inputs = tiny_models.prompts([40])
    wanted = generate(model, DynamicCache(config=model.config), inputs, 8).tolist()
    cache = streaming(model, sinks=0, window=64)
    assert generate(model, cache, inputs, 8).tolist() == wanted
    generate(model, cache, {"input_ids": torch.tensor(wanted)}, 120)
    assert cache.stats().blocks_used <= 64 // 16 + 1


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"window": 0}, r"window=0 is no number of tokens; .* at least 1"),
        ({"window": 2.5}, "window=2.5"),
        ({"window": True}, "window=True"),
        ({"window": 8, "sinks": -1}, r"sinks=-1 .* at least 0"),
        ({"sinks": 4}, "sinks=4 without window="),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes, told):
    with pytest.raises(hfpaged.InvalidConfigError, match=told):
        hfpaged.PagedCache(tiny_models.make("llama"), **sizes)


def test_a_cache_of_a_config_cannot_forget():
    with pytest.raises(hfpaged.InvalidConfigError, match=r"write PagedCache\(model, window=32\)"):
        hfpaged.PagedCache(config=tiny_models.make("llama").config, window=32)


def test_a_forward_that_was_not_announced_is_refused():
    model = tiny_models.make("llama")
    cache = streaming(model)
    with pytest.raises(hfpaged.StreamingError, match="call that model itself"):
        forward(model.model, cache, random_ids(1, 5))
    hfpaged.unpatch(model)
    with pytest.raises(hfpaged.StreamingError, match="do not unpatch it"):
        forward(model, cache, random_ids(1, 5))


def test_what_needs_a_dense_view_works_until_something_is_forgotten_and_is_refused_then():
    model, before = tiny_models.make("llama", "eager"), dict(attention.dense_calls)
    cache = streaming(model)
    forward(model, cache, random_ids(1, 20))
    attentions = model(random_ids(1, 1), output_attentions=True, **{CACHE: cache}).attentions
    assert attentions[0].shape[-1] == 21
    assert cache.layers[0].keys.shape[2] == 21
    cache, ids = grown(model), random_ids(2, 1)
    used = cache.stats().blocks_used
    with pytest.raises(hfpaged.StreamingError, match=r"part of its 100 positions.*\(read as a tensor\)"):
        _ = cache.layers[0].keys
    four_dimensions = {"attention_mask": torch.zeros(2, 1, 1, 101)}
    for arguments, why in (({"output_attentions": True}, "output_attentions"), (four_dimensions, "not causal")):
        with pytest.raises(
            hfpaged.StreamingError, match=rf"dense view .*\(.*{why}.*\); use a PagedCache without window="
        ):
            model(ids, **arguments, **{CACHE: cache})
    model.requires_grad_(True)
    with pytest.raises(hfpaged.StreamingError, match="read as a tensor"):
        model(ids, **{CACHE: cache})
    assert cache.stats().blocks_used == used
    model.requires_grad_(False)
    torch.testing.assert_close(forward(model, cache, ids), forward(model, grown(model), ids), atol=1e-5, rtol=1e-5)
    attention.dense_calls.clear()
    attention.dense_calls.update(before)


LONG = {
    "all_logits": ({}, "no logits_to_keep"),
    "hidden_states": ({"logits_to_keep": 1, "output_hidden_states": True}, "hidden states"),
    "many_logits": ({"logits_to_keep": 17}, "last 17 logits, a piece has 16"),
    "other_inputs": ({"logits_to_keep": 1, "pixel_values": torch.zeros(1, 3, 8, 8)}, "no place among the tokens"),
    "mask_of_4_dimensions": ({"logits_to_keep": 1, "attention_mask": torch.zeros(1, 1, 49, 49)}, "mask is not"),
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_prompt_that_cannot_be_computed_in_pieces_is_refused_with_their_size(case):
    arguments, why = LONG[case]
    model = tiny_models.make("llama")
    cache = streaming(model)
    with pytest.raises(hfpaged.StreamingError, match=rf"49 new .* 48 .*{why}.* at most 48, then 16 positions"):
        forward(model, cache, random_ids(1, 49), **arguments)
    assert cache.get_seq_length() == 0
    assert forward(model, cache, random_ids(1, 48)).shape[1] == 48
    with pytest.raises(hfpaged.StreamingError, match="17 new positions are more than the 16"):
        forward(model, cache, random_ids(1, 17))
    assert forward(model, cache, random_ids(1, 16)).shape[1] == 16


@pytest.mark.parametrize("keep", [1, 7, 16])
def test_the_last_piece_has_all_logits_that_the_caller_reads(keep):
    model = tiny_models.make("llama")
    for length in (49, 64, 65, 81):
        ids = random_ids(2, length)
        cache, other = streaming(model), streaming(model)
        ours = forward(model, cache, ids, logits_to_keep=keep)
        assert ours.shape[1] == keep
        assert cache.get_seq_length() == length
        pieces = pieces_of(length, 32, 4, 16)
        if pieces[-1] < keep:
            pieces[-2:] = [pieces[-2] + pieces[-1] - keep, keep]
        theirs = [forward(model, other, part) for part in ids.split(pieces, dim=1)][-1]
        torch.testing.assert_close(ours, theirs[:, -keep:], atol=1e-5, rtol=1e-5)


def test_sinks_that_are_no_token_ids_are_refused_and_work_without_sinks():
    model = tiny_models.make("llama")
    embeddings = model.get_input_embeddings()(random_ids(1, 20))
    with pytest.raises(hfpaged.StreamingError, match=r"token ids alone, not as .*inputs_embeds.* use sinks=0"):
        model(inputs_embeds=embeddings, **{CACHE: streaming(model)})
    with pytest.raises(hfpaged.StreamingError, match=r"positions \[0, 1, 5, 6\]\.\.\., which do not count on from 0"):
        forward(model, streaming(model), random_ids(1, 4), position_ids=torch.tensor([[0, 1, 5, 6]]))
    cache = streaming(model, sinks=0)
    generate(model, cache, {"inputs_embeds": embeddings}, 60)
    assert cache.stats().blocks_used <= 3


def test_embeddings_behind_the_sinks_are_what_their_token_ids_are():
    model = tiny_models.make("llama")
    cache, other, ids = streaming(model), streaming(model), random_ids(1, 80)
    for each in (cache, other):
        forward(model, each, ids[:, :20])
    ours = model(inputs_embeds=model.get_input_embeddings()(ids[:, 20:]), logits_to_keep=1, **{CACHE: cache}).logits
    torch.testing.assert_close(ours, forward(model, other, ids[:, 20:], logits_to_keep=1), atol=1e-5, rtol=1e-5)


def test_positions_that_begin_elsewhere_give_the_same_tokens():
    model, text = tiny_models.make("llama"), random_ids(1, 120)
    cache, other = streaming(model), streaming(model)
    for start in range(120):
        ids = text[:, start : start + 1]
        ours = forward(model, cache, ids, position_ids=torch.tensor([[1000 + start]]))
        torch.testing.assert_close(ours, forward(model, other, ids), atol=2e-4, rtol=2e-4)


@pytest.mark.demo_model
def test_the_demo_model_reads_on_with_sinks_and_loses_its_way_without(demo):
    """What the paper is about. Perplexity behind the window, in pieces of a block."""
    model, tokenizer = demo
    ids = tokenizer(" ".join(PARAGRAPHS), return_tensors="pt")["input_ids"][:, :384]
    assert ids.shape[1] == 384

    def perplexity(cache):
        logits = torch.cat([forward(model, cache, part) for part in ids.split(16, dim=1)], dim=1)
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
        return losses[128:].mean().exp().item()

    try:
        with_sinks, without = (perplexity(streaming(model, 64, sinks)) for sinks in (4, 0))
        whole = perplexity(hfpaged.PagedCache(model, num_blocks=500))
    finally:
        hfpaged.unpatch(model)
    assert 0.8 < with_sinks / whole < 1.2
    assert without > 1.5 * with_sinks


@pytest.mark.parametrize("model_type", ["falcon_h1", "jamba", "deepseek_v32", "lfm2_moe"])
def test_layers_with_a_state_do_not_forget_and_are_refused(model_type):
    with pytest.raises(hfpaged.UnsupportedModelError, match="keep a state of their own"):
        streaming(family_models.build(model_type))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("llama4_text", "in chunks"),
        ("ministral3", "scaled by their position"),
        ("beam", "scaled by their position"),
        ("bert", "rotary"),
    ],
)
def test_positions_that_are_more_than_a_distance_are_refused(model_type, why):
    with pytest.raises(hfpaged.UnsupportedModelError, match=why):
        streaming(family_models.build(model_type))


@pytest.mark.parametrize("model_type", ["gemma3", "fuyu"])
def test_text_alone_streams_through_a_model_that_knows_pictures(model_type):
    model = family_models.build(model_type)
    cache = streaming(model, 16, 4, 4)
    generate(model, cache, {"input_ids": torch.randint(3, 90, (2, 30))}, 40)
    rules = [rule for rule in cache._rows.rules if rule]
    assert all(table.first for table in cache._rows.sequences[0].tables if table.rule)
    assert len(rules) >= 1


def test_who_asks_why_nothing_was_shared_is_told():
    model = tiny_models.make("llama")
    cache = streaming(model)
    generate(model, cache, tiny_models.prompts([70, 20]), 3)
    assert [report.declined for report in cache.explain_last()] == [
        "a cache with window=, which forgets: what it stores depends on what it has forgotten"
    ] * 2


@pytest.mark.parametrize("letter", sorted({name[0] for name in family_models.MODEL_TYPES}))
def test_every_family_that_streams_with_sinks_knows_distances_only(letter):
    """Later positions for all tokens must change nothing, or sinks could not be moved."""
    torch.manual_seed(0)
    ids, places = torch.randint(3, 90, (1, 12)), torch.arange(12)[None]
    for model_type in (name for name in family_models.MODEL_TYPES if name.startswith(letter)):
        model = family_models.build(model_type)
        try:
            streaming(model, 16, 4, 4)
        except hfpaged.UnsupportedModelError:
            continue
        with torch.no_grad():
            here, later = (model(input_ids=ids, position_ids=places + shift).logits for shift in (0, 100))
        torch.testing.assert_close(here, later, atol=1e-3 * here.abs().max().item(), rtol=1e-3, msg=model_type)
