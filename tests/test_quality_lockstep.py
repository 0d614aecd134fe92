"""What is compared is what the caches really give: plain transformers on the same tokens is the judge."""

from __future__ import annotations

import pytest
import torch
from quality_model import small_llama
from transformers import DynamicCache

import hfpaged
from hfpaged.cache import PagedCache
from hfpaged.compat import cache_argument
from hfpaged.kv_format import resolve_format
from hfpaged.quality.contexts import Context
from hfpaged.quality.generations import compare_generations
from hfpaged.quality.heads import rank_heads, relative_error
from hfpaged.quality.layers import LayerEffect, alone, exempting, paged_layers, rank_layers
from hfpaged.quality.lockstep import compare
from hfpaged.quality.metrics import TokenScores, log_probs, score, summarize
from hfpaged.quality.sides import NATIVE, Side, parse_sides

SHORT, LONG = Context("short", 40), Context("long", 300)
HALF = Side("bfloat16", "bfloat16")


def nothing(*args):
    return nothing


@pytest.fixture(scope="module")
def model():
    model = small_llama(max_position_embeddings=512)
    yield model
    hfpaged.unpatch(model)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


def random_texts(context, rows=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, context.cached + 1), generator=generator)


class Rounded(DynamicCache):
    """What a bfloat16 cache should give: its first forward attends to what was computed, all later ones to what a
    bfloat16 keeps.
    """

    def update(self, key, value, layer, *args, **kwargs):
        is_first = self.get_seq_length(layer) == 0
        stored = super().update(key.bfloat16().float(), value.bfloat16().float(), layer, *args, **kwargs)
        return (key, value) if is_first else stored


def plain_scores(model, texts, context):
    """Native against rounded, by plain transformers, one token after the other."""
    hfpaged.unpatch(model)
    caches = [DynamicCache(config=model.config), Rounded(config=model.config)]
    steps = []
    for cache in caches:
        model(input_ids=texts[:, : context.prompt], **{cache_argument(): cache})
    for position in range(context.prompt, context.cached):
        ids = texts[:, position : position + 1]
        both = [log_probs(model(input_ids=ids, **{cache_argument(): cache}).logits[:, -1]) for cache in caches]
        steps.append(score(*both, texts[:, position + 1]))
    return TokenScores(*(torch.stack(parts, dim=1) for parts in zip(*steps, strict=True)))


@pytest.mark.parametrize("context", [SHORT, LONG], ids=lambda context: context.name)
def test_scores_are_those_of_plain_transformers_with_the_same_rounding(model, context):
    texts = random_texts(context, rows=3 if context == SHORT else 1)
    expected = plain_scores(model, texts, context)
    (found,) = compare(model, texts.split(2), context, [HALF], nothing)
    assert found.kl.shape == (len(texts), context.fed)
    assert expected.kl.mean() > 1e-6
    assert torch.allclose(found.nll_native, expected.nll_native, atol=1e-4)
    # A number that lies between two of bfloat16 may be rounded either way, once in a while.
    assert (found.nll - expected.nll).abs().mean() < 1e-3 < (found.nll - found.nll_native).abs().mean()
    assert summarize(found).kl_mean == pytest.approx(summarize(expected).kl_mean, rel=0.05)


def test_native_perplexity_is_that_of_one_plain_forward_over_the_whole_text(model):
    texts = random_texts(SHORT)
    (found,) = compare(model, [texts], SHORT, [HALF], nothing)
    hfpaged.unpatch(model)
    logits = model(input_ids=texts).logits[:, SHORT.prompt : -1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, SHORT.prompt + 1 :].flatten())
    assert summarize(found).perplexity_native == pytest.approx(loss.exp().item(), rel=1e-4)


def test_the_native_format_is_no_different_from_itself(model):
    texts = random_texts(SHORT)
    (found,) = compare(model, [texts], SHORT, [Side("again", "auto")], nothing)
    summary = summarize(found)
    assert (summary.kl_mean, summary.kl_p99, summary.ppl_change, summary.top1) == (0, 0, 0, 1)
    (parting,) = compare_generations(model, texts[:, :20], [Side("again", "auto")], 16)
    assert parting == (None, 1.0, 1.0)


def test_each_step_is_ticked_and_all_blocks_come_back(model):
    ticks, pools = [], []
    make = PagedCache.free
    texts = random_texts(SHORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedCache, "free", lambda self: (pools.append(self.pool), make(self)))
        compare(model, [texts[:2], texts[2:]], SHORT, [HALF], lambda: ticks.append(1))
    assert len(ticks) == 2 * SHORT.fed
    assert len(pools) == 4
    assert all(pool.stats().blocks_used == 0 for pool in pools)


def test_bytes_per_token_are_keys_and_values_of_all_layers(model):
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert NATIVE.footprint(model) == (4 * numbers, 0)
    assert HALF.footprint(model) == (2 * numbers, 0)
    heads = numbers // config.head_dim
    assert Side("int8", "int8").footprint(model) == (numbers + 2 * heads, 0)  # a scale of 2 bytes for each row


def test_a_format_of_four_bits_keeps_a_block_of_each_sequence_as_it_was_computed(model):
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    found = Side("int4", "int4").footprint(model)
    assert numbers / 2 < found.per_token < numbers
    assert found.per_sequence == 16 * 4 * numbers


def test_formats_are_named_once_each_and_described_by_layer():
    assert [side.name for side in parse_sides("bfloat16", "float16, bfloat16")] == ["bfloat16", "float16"]
    (side,) = parse_sides('{"default": "bfloat16", "layers": {"0": "auto", "3": "float16"}}', None)
    assert side.name == "bfloat16, layer 0 auto, layer 3 float16"
    assert side.kv_dtype == {"default": "bfloat16", "layers": {"0": "auto", "3": "float16"}}


@pytest.mark.parametrize(
    ("kv", "words"), [("int3", "int3"), ("{", "this is no JSON"), ('{"layers": 3}', "a mapping has the keys")]
)
def test_what_is_no_format_is_named(kv, words):
    with pytest.raises(hfpaged.InvalidConfigError, match=words):
        parse_sides(kv, None)


class Coarse(Side):
    """A format that is bad in one layer alone: `kv_dtype` is its number."""

    def make_cache(self, model):
        cache = PagedCache(model, prefix_sharing=False)
        layer = cache.layers[self.kv_dtype]
        update = layer.update
        layer.update = lambda key, value, *args, **kwargs: update(key.round(), value, *args, **kwargs)
        return cache


def test_layers_are_ranked_by_what_each_does_alone(model):
    assert paged_layers(model) == [0, 1]
    sides = {0: NATIVE, 1: Coarse("coarse", 1)}
    ranked = rank_layers(model, [random_texts(SHORT)], SHORT, sides, nothing)
    assert [effect.layer for effect in ranked] == [1, 0]
    assert ranked[0].kl_mean > 1e-4 > ranked[1].kl_mean == 0
    assert ranked[1].top1 == 1


def test_a_layer_alone_and_the_worst_exempted_are_written_as_kv_dtype_takes_them():
    assert resolve_format(alone(HALF, 3).kv_dtype) == only(3, "bfloat16")
    mixed = Side("mixed", {"default": "bfloat16", "layers": {"3": "float16"}})
    assert resolve_format(alone(mixed, 3).kv_dtype) == only(3, "float16")
    assert resolve_format(alone(mixed, 4).kv_dtype) == only(4, "bfloat16")
    worst = [LayerEffect(7, 0.2, 0.9), LayerEffect(1, 0.1, 0.9)]
    assert exempting(HALF, worst) == {"default": "bfloat16", "layers": {1: "auto", 7: "auto"}}
    assert exempting(mixed, worst) == {"default": "bfloat16", "layers": {1: "auto", 3: "float16", 7: "auto"}}


def only(layer, name):
    return resolve_format({"default": "auto", "layers": {layer: name}})


def test_heads_are_ranked_by_what_comes_back_from_their_blocks(model):
    texts = random_texts(SHORT)[:, :-1]
    ranked = rank_heads(model, texts, HALF)
    assert {(effect.layer, effect.head) for effect in ranked} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    worst = [max(effect.key_error, effect.value_error) for effect in ranked]
    assert worst == sorted(worst, reverse=True)
    hfpaged.unpatch(model)
    cache = DynamicCache(config=model.config)
    model(input_ids=texts, **{cache_argument(): cache})
    for effect in ranked:
        keys = cache.layers[effect.layer].keys[:, effect.head]
        error = (keys.bfloat16().float() - keys).norm() / keys.norm()
        assert effect.key_error == pytest.approx(error.item(), rel=0.02)
        assert effect.key_amax == pytest.approx(keys.abs().max().item(), rel=1e-4)
        assert effect.key_outlier == pytest.approx((keys.abs().max() / keys.square().mean().sqrt()).item(), rel=1e-4)


def test_relative_errors_by_hand():
    exact = torch.tensor([[[[3.0, 4.0]], [[0.0, 0.0]]]])
    stored = torch.tensor([[[[3.0, 3.0]], [[0.0, 0.0]]]])
    assert relative_error(exact, stored).tolist() == pytest.approx([0.2, 0.0])
