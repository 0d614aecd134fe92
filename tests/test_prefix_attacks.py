"""Ways in which a shared prefix could give wrong tokens, each tried."""

from __future__ import annotations

import gc

import pytest
import tiny_models
import torch
from sharing import (
    BLOCK,
    assert_generates_the_same,
    counting,
    forward,
    generate,
    own,
    padded,
    paged,
    random_tokens,
)

import hfpaged
from hfpaged import adapters, prefix_sharing
from hfpaged.content import read_content


@pytest.fixture(autouse=True)
def short_prompts_are_cut_too(monkeypatch):
    monkeypatch.setattr(prefix_sharing, "FORWARD_COST", 0)


@pytest.fixture
def model():
    return tiny_models.make("llama")


def assert_next_prompt_is_right(model, pool, tokens, **options):
    """A new prompt on the pool that begins with `tokens` gets the logits of transformers' own cache."""
    cache = paged(model, pool, **options)
    assert_generates_the_same(model, cache, [[*tokens, 5]], new=3)


# What stands where


def test_a_buffer_that_its_user_fills_anew_for_each_step_is_read_when_it_is_given(model):
    cache = paged(model)
    tokens = random_tokens(3 * BLOCK, 1)
    buffer, place = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    for position, token in enumerate(tokens):
        buffer.fill_(token)
        place.fill_(position)
        forward(model, cache, buffer, position_ids=place, logits_to_keep=1)
    constant = [tokens[-1]] * len(tokens)
    pool = cache.pool
    del cache
    assert_next_prompt_is_right(model, pool, constant)
    with counting(model) as counted:
        generate(model, paged(model, pool), [[*tokens, 5]], new=1)
    assert counted.tokens == 1


def test_steps_without_positions_behind_padding_are_not_found_by_plain_prompts(model):
    """A model that is given no positions counts padding in."""
    cache = paged(model)
    first, more = random_tokens(6, 1), random_tokens(2 * BLOCK, 2)
    inputs = padded(first, random_tokens(10, 3))
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    forward(model, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=positions)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, len(more), dtype=torch.long)], dim=1)
    forward(model, cache, torch.tensor([more, more]), attention_mask=mask)
    pool = cache.pool
    del cache
    assert_next_prompt_is_right(model, pool, first + more)


def test_inputs_of_other_names_with_equal_numbers_differ():
    model = tiny_models.make("gpt2")
    ids = torch.tensor([random_tokens(3 * BLOCK, 1)])
    numbers = torch.arange(7, 7 + ids.shape[1])[None]
    cache = paged(model)
    forward(model, cache, ids, token_type_ids=numbers, position_ids=torch.arange(ids.shape[1])[None])
    pool = cache.pool
    del cache
    ours = forward(model, paged(model, pool), ids, position_ids=numbers, logits_to_keep=1)
    theirs = forward(model, own(model), ids, position_ids=numbers, logits_to_keep=1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_tensor_that_has_a_prompts_shape_by_accident_is_no_input_by_position():
    ids = torch.ones(1, 3, dtype=torch.long)
    content = read_content({"input_ids": ids, "pixel_values": torch.ones(1, 3, 4, 4)})
    assert content.by_position == {}
    assert [key.kind for key in content.keys] == ["input:pixel_values"]


# What they were computed with


@pytest.mark.parametrize(
    ("names", "later"), [(("a",), ()), (("a", "b"), ("a",)), (("a",), ("a", "b")), (("a",), ("b",))]
)
@pytest.mark.parametrize("turns", ["generate", "forward"])
def test_a_chat_whose_adapter_changes_is_not_found_under_the_old_one(model, monkeypatch, names, later, turns):
    """The stand-in for an adapter changes what the first layer computes."""
    active = list(names)
    monkeypatch.setattr(adapters, "active_adapters", lambda model: tuple(active))
    cache = paged(model)

    def beside_the_weights(module, args, output):  # so that the fingerprint does not see it
        return output + 0.05 * sum(ord(name) for name in active)

    hook = model.model.layers[0].register_forward_hook(beside_the_weights)
    try:
        history = generate(model, cache, [random_tokens(2 * BLOCK, 1)], new=4).sequences
        active[:] = later
        if turns == "generate":
            history = torch.cat([history, torch.tensor([random_tokens(2 * BLOCK, 2)])], dim=1)
            history = generate(
                model, cache, {"input_ids": history, "attention_mask": torch.ones_like(history)}
            ).sequences
        else:
            more = torch.tensor([random_tokens(2 * BLOCK, 2)])
            forward(model, cache, more)
            history = torch.cat([history[:, :-1], more], dim=1)
        pool = cache.pool
        del cache
        active[:] = names
        assert_next_prompt_is_right(model, pool, history[0].tolist())
    finally:
        hook.remove()


def test_keys_computed_under_autocast_end_with_it(model):
    cache = paged(model)
    with torch.autocast("cpu", torch.bfloat16):
        history = generate(model, cache, [random_tokens(2 * BLOCK, 1)], new=4).sequences
    root = cache._rows.tokens.root
    more = torch.cat([history, torch.tensor([random_tokens(2 * BLOCK, 2)])], dim=1)
    try:
        generate(model, cache, {"input_ids": more, "attention_mask": torch.ones_like(more)})
    except hfpaged.CacheMismatchError:
        return  # other dtypes
    assert cache._rows.tokens.root is not root


# Blocks that are about to change


def test_assigned_keys_are_found_by_nobody(model):
    cache = paged(model)
    tokens = random_tokens(4 * BLOCK, 1)
    forward(model, cache, tokens)
    assert cache.stats().blocks_used == 4
    cache.layers[0].keys = cache.layers[0].keys * 0.5
    cache.pool.check_integrity()
    assert_next_prompt_is_right(model, cache.pool, tokens)
    forward(model, cache, random_tokens(2 * BLOCK, 2))
    assert_next_prompt_is_right(model, cache.pool, tokens + random_tokens(2 * BLOCK, 2))


def test_a_forward_that_is_not_announced_is_not_taken_for_one_that_failed(model):
    cache = paged(model)
    tokens, other = random_tokens(2 * BLOCK - 1, 1), random_tokens(1, 2)
    forward(model, cache, tokens)
    with pytest.raises(IndexError):
        forward(model, cache, [9999])
    hfpaged.unpatch(model)
    forward(model, cache, other)
    hfpaged.patch(model)
    forward(model, cache, random_tokens(2 * BLOCK, 3))
    pool = cache.pool
    del cache
    roots = pool.prefixes.index.roots
    known = [entry.items for root in roots for entry in root.children.values()]
    assert all(9999 not in items for items in known)
    assert_next_prompt_is_right(model, pool, tokens + other + random_tokens(2 * BLOCK, 3))


# Pools that are just large enough


@pytest.mark.parametrize("length", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_pool_that_just_holds_a_prompt_holds_it_again(name, length):
    model = tiny_models.make(name)
    tokens = random_tokens(length, 1)
    groups = len(paged(model).pool.groups)
    pool = paged(model, block_size=BLOCK, num_blocks=groups * -(-length // BLOCK)).pool
    for _ in range(3):
        assert_generates_the_same(model, paged(model, pool), [tokens], new=1)
        gc.collect()
        assert pool.stats().blocks_used == 0


def test_what_was_found_never_takes_the_room_that_the_prompts_need(model):
    rows = [random_tokens(3 * BLOCK, 1)[: 2 * BLOCK + 3] + random_tokens(5, seed) for seed in (2, 3)]
    rows += [random_tokens(2 * BLOCK + 5, 9)]
    pool = paged(model, num_blocks=3 * -(-len(rows[0]) // BLOCK)).pool
    for _ in range(3):
        assert_generates_the_same(model, paged(model, pool), rows, new=1)


# Roots


def test_two_caches_that_begin_before_either_published_find_each_others_blocks(model):
    pool = paged(model).pool
    first, second = paged(model, pool), paged(model, pool)
    short = [random_tokens(3, 1), random_tokens(3, 2)]
    for cache, tokens in zip((first, second), short, strict=True):
        forward(model, cache, tokens)
    more = random_tokens(2 * BLOCK, 3)
    for cache in (first, second):
        forward(model, cache, more)
    del first, second, cache
    pool.check_integrity()
    for tokens in short:
        with counting(model) as counted:
            assert_next_prompt_is_right(model, pool, tokens + more)
        assert counted.forwards[0] <= 4


def test_nobody_shares_who_is_another_salt(model):
    pool = paged(model).pool
    tokens = random_tokens(3 * BLOCK, 1)
    for salt in (None, "", "a", "b"):
        with counting(model) as counted:
            generate(model, paged(model, pool, salt=salt), [tokens], new=1)
        assert counted.tokens == len(tokens)
    assert pool.stats().prefix_hits == 0


def test_what_was_computed_under_a_hook_is_not_saved(tmp_path):
    model = tiny_models.make("llama")
    pool = paged(model).pool
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + 0.5)
    generate(model, paged(model, pool), [random_tokens(40, 1)])
    assert pool.stats().blocks_cached > 0
    assert pool.save_prefixes(tmp_path / "prefixes.safetensors").blocks == 0


def test_a_hook_that_steers_a_layer_finds_nothing_that_was_computed_without_it():
    model = tiny_models.make("llama")
    pool, prompt = paged(model).pool, random_tokens(40, 1)
    generate(model, paged(model, pool), [prompt])
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output + 0.5)
    assert_generates_the_same(model, paged(model, pool), [prompt])
    assert pool.stats().prefix_hits == 0
    handle.remove()
    assert_generates_the_same(model, paged(model, pool), [prompt])
    assert pool.stats().prefix_hits > 0
