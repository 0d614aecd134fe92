"""Patching a model: it computes what it did before, and is given back as it was."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import tiny_models
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
    pipeline,
)

import hfpaged
from hfpaged import compat
from hfpaged.patching import is_patched

CACHE = compat.cache_argument()
INPUTS = tiny_models.prompts([9, 4, 22])


@pytest.fixture
def model():
    return tiny_models.make("llama")


def generate(model, **arguments):
    return model.generate(**INPUTS, max_new_tokens=8, do_sample=False, **arguments).tolist()


def generated_with(model, **arguments):
    """The cache that generate() used."""
    output = model.generate(**INPUTS, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **arguments)
    return output.get(CACHE)


def state(model):
    """Everything of a model that a patch may touch."""
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._forward_hooks_with_kwargs)
    return (
        [config._attn_implementation for config in compat.configs_of(model)],
        [dict(hook) for hook in (*hooks, model._forward_hooks_always_called, model._forward_pre_hooks_with_kwargs)],
        set(vars(model)),
        model.config.to_json_string(),
    )


# On and off


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("gemma2", "eager"),
        ("gpt2", "sdpa"),
        ("mpt", "eager"),
        ("falcon", "sdpa"),
    ],
)
def test_unpatch_leaves_no_trace(name, own, default):
    model = tiny_models.make(name, own)
    before = state(model)
    assert hfpaged.patch(model, default=default) is model
    assert is_patched(model)
    reached = name not in tiny_models.OWN_ATTENTION
    assert model.config._attn_implementation == (compat.ATTENTION_NAME if reached else own)
    generate(model)
    assert hfpaged.unpatch(model) is model
    assert not is_patched(model)
    assert state(model) == before


def test_unpatch_of_an_unpatched_model_is_no_error(model):
    before = state(model)
    hfpaged.unpatch(model)
    hfpaged.unpatch(hfpaged.unpatch(hfpaged.patch(model)))
    assert state(model) == before


def test_a_second_patch_changes_nothing_and_one_unpatch_undoes_both(model):
    before = state(model)
    hfpaged.patch(model)
    once = state(model)
    hfpaged.patch(model)
    hfpaged.PagedCache(model)
    assert state(model) == once
    hfpaged.unpatch(model)
    assert state(model) == before


def test_patched_leaves_the_model_as_it_was(model):
    before = state(model)
    with hfpaged.patched(model) as same:
        assert same is model
        inside = state(model)
        with hfpaged.patched(model):
            assert state(model) == inside
        assert state(model) == inside
    assert state(model) == before
    with pytest.raises(ZeroDivisionError), hfpaged.patched(model):
        raise ZeroDivisionError
    assert state(model) == before
    hfpaged.patch(model)
    with hfpaged.patched(model):
        pass
    assert is_patched(model)


def test_an_implementation_that_was_chosen_meanwhile_stays(model):
    hfpaged.patch(model)
    model.set_attn_implementation("eager")
    hfpaged.unpatch(model)
    assert model.config._attn_implementation == "eager"


def test_a_cache_outlives_the_patch(model):
    wanted = generate(model)
    cache = hfpaged.PagedCache(model, num_blocks=50)
    first = model.generate(**INPUTS, max_new_tokens=3, do_sample=False, **{CACHE: cache})
    hfpaged.unpatch(model)
    mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, 3, dtype=torch.long)], dim=1)
    # unpatched, nothing tells the cache of padding: what is new has none
    assert (
        model.generate(first, attention_mask=mask, max_new_tokens=5, do_sample=False, **{CACHE: cache}).tolist()
        == wanted
    )
    cache.pool.check_integrity()


# Everything else that one does with a model


OTHER_USES = {
    "no_cache_named": lambda model: generate(model),
    "dynamic": lambda model: generate(model, **{CACHE: DynamicCache(config=model.config)}),
    "static": lambda model: generate(model, **{CACHE: StaticCache(config=model.config, max_cache_len=40)}),
    "without_cache": lambda model: generate(model, use_cache=False),
    "beams": lambda model: generate(model, num_beams=3),
    "chunked": lambda model: generate(model, prefill_chunk_size=5),
}


@pytest.mark.parametrize("use", OTHER_USES)
@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_other_caches_give_what_they_gave_before(name, own, use):
    model = tiny_models.make(name, own)
    wanted = OTHER_USES[use](model)
    with hfpaged.patched(model):
        assert OTHER_USES[use](model) == wanted


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss", "falcon"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_patched_model_is_trained_as_before(name, use_cache):
    model = tiny_models.make(name).requires_grad_(True)
    labels = INPUTS["input_ids"].masked_fill(INPUTS["attention_mask"] == 0, -100)

    def gradients():
        model.zero_grad()
        loss = model(**INPUTS, labels=labels, use_cache=use_cache).loss
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    wanted = gradients()
    with hfpaged.patched(model):
        found = gradients()
    torch.testing.assert_close(found, wanted)
    assert len(found[1]) > 5


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_attention_weights_are_given_to_those_who_ask(name):
    model = tiny_models.make(name, "eager")
    with torch.no_grad():
        wanted = model(**INPUTS, output_attentions=True)
        with hfpaged.patched(model):
            cache = hfpaged.PagedCache(config=model.config, num_blocks=50)
            for arguments in ({}, {CACHE: cache}):
                found = model(**INPUTS, output_attentions=True, **arguments)
                torch.testing.assert_close(found.attentions, wanted.attentions)


def test_a_patched_model_is_saved_under_its_own_attention(model, tmp_path):
    wanted = generate(model)
    hfpaged.patch(model, default=True)
    model.save_pretrained(tmp_path)
    for path in tmp_path.glob("*.json"):
        assert "hfpaged" not in path.read_text(encoding="utf-8"), path.name
    assert "hfpaged" not in json.dumps(model.config.to_dict(), default=str)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert generate(loaded) == wanted


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "falcon", "gemma2", "gpt_oss"])
def test_a_copy_of_a_patched_model_computes_the_same(name, default):
    model = tiny_models.make(name)
    wanted = generate(model)
    hfpaged.patch(model, default=default)
    twin = copy.deepcopy(model)
    for _ in range(2):
        assert generate(twin) == wanted
        assert generate(twin, **{CACHE: DynamicCache(config=twin.config)}) == wanted
        assert generate(twin, **{CACHE: hfpaged.PagedCache(config=twin.config, num_blocks=99)}) == wanted
        assert generate(model, **{CACHE: hfpaged.PagedCache(model, num_blocks=99)}) == wanted
        hfpaged.unpatch(model)  # the copy stays as it is
    assert generate(twin, **{CACHE: hfpaged.PagedCache(twin, num_blocks=99)}) == wanted
    assert generate(hfpaged.unpatch(twin)) == wanted


# Several models


def test_two_models_are_patched_at_once(model):
    other = tiny_models.make("mistral", "eager")
    wanted = generate(model), generate(other)
    with hfpaged.patched(model), hfpaged.patched(other):
        for each, tokens in zip((model, other), wanted, strict=True):
            assert generate(each) == tokens
            assert generate(each, **{CACHE: hfpaged.PagedCache(each, num_blocks=99)}) == tokens
    assert (model.config._attn_implementation, other.config._attn_implementation) == ("sdpa", "eager")


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_of_one_config_are_unpatched_in_any_order(model, first):
    twins = [model, LlamaForCausalLM(model.config).eval()]
    twins[1].load_state_dict(model.state_dict())
    twins[1].generation_config = model.generation_config
    assert twins[0].config is twins[1].config
    wanted = generate(model)
    for each in twins:
        hfpaged.patch(each)
    hfpaged.unpatch(twins[first])
    other = twins[1 - first]
    assert is_patched(other)
    assert not is_patched(twins[first])
    assert model.config._attn_implementation == compat.ATTENTION_NAME
    for each in twins:
        assert generate(each) == wanted
        assert generate(each, **{CACHE: hfpaged.PagedCache(config=each.config, num_blocks=99)}) == wanted
    hfpaged.unpatch(other)
    assert model.config._attn_implementation == "sdpa"
    assert generate(other) == wanted


# default=True


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon"])
def test_a_default_cache_comes_to_generate_by_itself_on_one_pool(name):
    model = tiny_models.make(name)
    wanted = {beams: generate(model, num_beams=beams) for beams in (1, 3)}
    hfpaged.patch(model, default=True)
    first = generated_with(model)
    assert isinstance(first, hfpaged.PagedCache)
    pool = first.pool
    for beams, tokens in wanted.items():
        assert generate(model, num_beams=beams) == tokens
    second = generated_with(model)
    assert second is not first
    assert second.pool is pool
    pool.check_integrity()
    assert pool.num_free < pool.num_blocks
    del first, second
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks
    hfpaged.unpatch(model)
    assert type(generated_with(model)) is DynamicCache


def test_a_default_cache_gives_way_to_what_the_caller_chose(model):
    hfpaged.patch(model, default=True)
    mine = DynamicCache(config=model.config)
    assert generated_with(model, **{CACHE: mine}) is mine
    paged = hfpaged.PagedCache(config=model.config, num_blocks=50)
    assert generated_with(model, **{CACHE: paged}) is paged
    assert isinstance(generated_with(model, cache_implementation="static"), StaticCache)
    assert generated_with(model, use_cache=False) is None
    assert isinstance(generated_with(model), hfpaged.PagedCache)


def test_default_may_be_added_to_a_patch(model):
    hfpaged.patch(model)
    assert type(generated_with(model)) is DynamicCache
    hfpaged.patch(model, default=True)
    assert isinstance(generated_with(model), hfpaged.PagedCache)
    hfpaged.patch(model)  # says nothing of it
    assert isinstance(generated_with(model), hfpaged.PagedCache)
    hfpaged.unpatch(model)
    assert type(generated_with(model)) is DynamicCache


def test_a_pipeline_writes_the_same_text_with_a_default_cache(model):
    words = {f"w{number}": number for number in range(tiny_models.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w3", padding_side="left")
    writer = pipeline("text-generation", model=model, tokenizer=fast)
    texts = ["w5 w9 w44 w8", "w17", "w20 w21 w22 w23 w24 w25 w26"]
    settings = {"do_sample": False, "max_new_tokens": 9, "batch_size": 3}
    wanted = writer(texts, **settings)
    with hfpaged.patched(model, default=True):
        assert writer(texts, **settings) == wanted
        assert isinstance(generated_with(model), hfpaged.PagedCache)


# Imports


def test_importing_registers_nothing_and_a_patch_does():
    program = """
import hfpaged, hfpaged.patching, hfpaged.cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers import LlamaConfig, LlamaForCausalLM
names = lambda: [name in functions for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
                 for name in ("hfpaged",)]
config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
hfpaged.PagedCache(config=config)
assert names() == [False, False], names()
hfpaged.patch(LlamaForCausalLM(config))
assert names() == [True, True], names()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
