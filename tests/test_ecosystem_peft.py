"""Adapters of PEFT: wrapped around a model or loaded by transformers itself, switched between calls."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn
from transformers import DynamicCache

import hfpaged
from hfpaged import compat
from hfpaged.adapters import active_adapters, row_adapters
from hfpaged.patching import is_patched

CACHE = compat.cache_argument()
INPUTS = tiny_models.prompts([9, 4, 22])
WAYS = {"greedy": {}, "beams": {"num_beams": 3}}
FIRST, SECOND = "first", "second"


def lora(targets=("q_proj", "v_proj"), **settings):
    return LoraConfig(r=4, target_modules=list(targets), task_type=TaskType.CAUSAL_LM, **settings)


def with_large_adapters(model):
    """Adapters start as zeros; these change the tokens."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.5, generator=generator)
    return model.eval().requires_grad_(False)


@pytest.fixture
def model():
    """A llama in PEFT's wrapper, with two adapters on different layers, the first one active."""
    wrapped = get_peft_model(tiny_models.make("llama"), lora(), adapter_name=FIRST)
    wrapped.add_adapter(SECOND, lora(["q_proj", "k_proj", "down_proj"]))
    return with_large_adapters(wrapped)


@pytest.fixture
def loaded(monkeypatch):
    """The same by transformers' own integration, without a wrapper.

    transformers 5.24 asks for a PEFT that is newer than any release; what it uses here is in older ones.
    """
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)
    plain = tiny_models.make("llama")
    plain.add_adapter(lora(), adapter_name=FIRST)
    plain.add_adapter(lora(["q_proj", "k_proj", "down_proj"]), adapter_name=SECOND)
    plain.set_adapter(FIRST)
    return with_large_adapters(plain)


def generate(model, cache, inputs=INPUTS, **arguments):
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, **{CACHE: cache}, **arguments).tolist()


def dynamic(model, **arguments):
    with_own = generate(model, DynamicCache(config=model.config), **arguments)
    assert with_own == generate(model, None, **arguments)
    return with_own


def paged(model, **arguments):
    cache = hfpaged.PagedCache(model, num_blocks=99)
    tokens = generate(model, cache, **arguments)
    cache.pool.check_integrity()
    return tokens


# The wrapper


WHAT_USERS_PASS = {
    "the_wrapper": lambda model: model,
    "the_tuner": lambda model: model.base_model,
    "the_model_inside": lambda model: model.get_base_model(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", WHAT_USERS_PASS)
def test_a_wrapped_model_generates_what_it_did(model, what, way):
    wanted = dynamic(model, **WAYS[way])
    passed = WHAT_USERS_PASS[what](model)
    cache = hfpaged.PagedCache(passed, num_blocks=99)
    assert is_patched(model)
    assert is_patched(model.get_base_model())
    assert model.config._attn_implementation == compat.ATTENTION_NAME
    assert generate(model, cache, **WAYS[way]) == wanted
    if way == "greedy":
        lengths = INPUTS["attention_mask"].sum(dim=1) + 7  # the last token has not been computed
        assert cache.stats().tokens == int(lengths.sum())  # padding is known, so the hooks sit where they are called
    assert hfpaged.unpatch(passed) is passed
    assert not is_patched(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model.get_base_model()._forward_pre_hooks
    assert dynamic(model, **WAYS[way]) == wanted


def test_patch_of_a_wrapper_is_patch_of_the_model_inside(model):
    inside = model.get_base_model()
    assert hfpaged.patch(model) is model
    hooks = dict(inside._forward_pre_hooks)
    assert len(hooks) == 1
    hfpaged.patch(inside)
    assert dict(inside._forward_pre_hooks) == hooks
    assert not model._forward_pre_hooks
    hfpaged.unpatch(inside)
    assert not is_patched(model)
    with hfpaged.patched(model) as same:
        assert same is model
        assert is_patched(inside)
    assert not is_patched(inside)


def test_a_wrapped_model_gets_a_default_cache(model):
    wanted = dynamic(model)
    with hfpaged.patched(model, default=True):
        output = model.generate(**INPUTS, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        assert isinstance(output.get(CACHE), hfpaged.PagedCache)
        assert output.sequences.tolist() == wanted
    assert "_prepare_cache_for_generation" not in vars(model.get_base_model())


def test_a_wrapper_around_a_patched_model(model):
    plain = hfpaged.patch(tiny_models.make("llama"))
    wrapped = get_peft_model(plain, lora(), adapter_name=FIRST)
    wrapped.add_adapter(SECOND, lora(["q_proj", "k_proj", "down_proj"]))
    with_large_adapters(wrapped)
    assert is_patched(wrapped)
    assert paged(wrapped) == dynamic(model)


def test_what_holds_no_model_of_transformers_is_refused():
    for wrong in (nn.Linear(3, 3), "gpt2", None):
        with pytest.raises(hfpaged.UnsupportedModelError, match=r"no transformers\.PreTrainedModel and holds none"):
            hfpaged.patch(wrong)
    with pytest.raises(hfpaged.UnsupportedModelError, match="Linear is no"):
        hfpaged.PagedCache(nn.Linear(3, 3))


# Switching


def states(model):
    """Every state of the adapters once, by name; each is entered from the one before."""
    yield "first", (FIRST,)
    model.set_adapter(SECOND)
    yield "second", (SECOND,)
    with model.disable_adapter():
        yield "disabled", ()
    model.base_model.set_adapter([FIRST, SECOND])
    yield "both", (FIRST, SECOND)
    model.set_adapter(FIRST)
    model.merge_adapter()
    yield "merged", (FIRST,)
    with model.disable_adapter():
        yield "merged_and_disabled", ()
    model.unmerge_adapter()
    yield "unmerged", (FIRST,)
    model.merge_adapter([SECOND])
    yield "second_merged_where_it_is", (FIRST, SECOND)  # where it is not, the first one goes on
    model.unmerge_adapter()
    model.delete_adapter(SECOND)
    yield "deleted", (FIRST,)


def test_adapters_are_switched_between_calls_on_one_pool(model):
    twin = copy.deepcopy(model)
    pool = hfpaged.PagedCache(model, num_blocks=99).pool
    seen = {}
    for (state, _), _ in zip(states(model), states(twin), strict=True):
        cache = hfpaged.PagedCache(model, pool=pool)
        seen[state] = generate(model, cache)
        assert seen[state] == dynamic(twin), state
    assert len({str(seen[state]) for state in ("first", "second", "disabled", "both")}) == 4
    assert seen["merged_and_disabled"] == seen["disabled"]
    del cache
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks


def test_an_adapter_at_another_scale_finds_no_prefix(model):
    twin = copy.deepcopy(model)
    pool = hfpaged.PagedCache(model, num_blocks=200).pool
    hits = []
    for scale in (1.0, 1.0, 0.25):
        for module in (*model.modules(), *twin.modules()):
            if hasattr(module, "set_scale"):
                module.set_scale(FIRST, scale)
        before = pool.stats().prefix_hits
        assert generate(model, hfpaged.PagedCache(model, pool=pool)) == dynamic(twin), scale
        hits.append(pool.stats().prefix_hits - before)
    assert hits[1] > 0
    assert hits[0] == hits[2] == 0


def test_one_cache_goes_on_under_another_adapter(model):
    def chat(cache):
        answer = model.generate(**INPUTS, max_new_tokens=5, do_sample=False, **{CACHE: cache})
        model.set_adapter(SECOND)
        mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, 5, dtype=torch.long)], dim=1)
        again = {"input_ids": answer, "attention_mask": mask}
        tokens = generate(model, cache, again)
        model.set_adapter(FIRST)
        return tokens

    wanted = chat(DynamicCache(config=model.config))
    assert chat(hfpaged.PagedCache(model, num_blocks=99)) == wanted


def test_a_merged_model_without_its_wrapper(model):
    hfpaged.patch(model)
    bare = model.merge_and_unload()
    assert is_patched(bare)
    assert active_adapters(bare) == ()
    wanted = dynamic(bare)
    assert paged(bare) == wanted


def test_equal_rows_under_different_adapters_stay_apart(model):
    """PEFT computes each row with its own adapter: equal tokens, other keys."""
    inputs = {name: given.repeat(3, 1) for name, given in tiny_models.prompts([11]).items()}
    for way in WAYS.values():
        settings = way | {"adapter_names": [FIRST, SECOND, "__base__"]}
        wanted = generate(model, DynamicCache(config=model.config), inputs, **settings)
        assert len({str(row) for row in wanted}) == 3
        assert paged(model, inputs=inputs, **settings) == wanted
    one = [FIRST] * 3
    wanted = generate(model, DynamicCache(config=model.config), inputs, adapter_names=one)
    assert paged(model, inputs=inputs, adapter_names=one) == wanted


def test_a_batch_of_several_adapters_shares_no_prefixes(model):
    """What one row computed under its adapter is found neither by the rows beside it nor by the next batch."""
    pool = hfpaged.PagedCache(model, num_blocks=99).pool
    inputs = {name: given.repeat(2, 1) for name, given in tiny_models.prompts([50]).items()}
    for names in ([FIRST, SECOND], [SECOND, FIRST], [FIRST, "__base__"], [FIRST, SECOND]):
        wanted = generate(model, DynamicCache(config=model.config), inputs, adapter_names=names)
        cache = hfpaged.PagedCache(model, pool=pool)
        assert generate(model, cache, inputs, adapter_names=names) == wanted
    wanted = generate(model, DynamicCache(config=model.config), inputs)
    assert generate(model, hfpaged.PagedCache(model, pool=pool), inputs) == wanted
    pool.check_integrity()


# Names


def test_the_names_of_the_active_adapters(model):
    for state, names in states(model):
        for passed in (model, model.base_model, model.get_base_model()):
            assert active_adapters(passed) == names, state


def test_a_model_without_adapters_has_no_names():
    model = tiny_models.make("llama")
    assert active_adapters(model) == ()
    assert row_adapters(model) is None


def test_an_adapter_that_is_the_copy_of_a_module_has_a_name():
    config = lora(["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(tiny_models.make("llama"), config, adapter_name=FIRST)
    assert active_adapters(model) == (FIRST,)
    with model.disable_adapter():
        assert active_adapters(model) == ()


def test_the_names_of_other_kinds_of_adapters():
    config = IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type=TaskType.CAUSAL_LM
    )
    model = get_peft_model(tiny_models.make("llama"), config, adapter_name=FIRST)
    assert active_adapters(model) == (FIRST,)
    inner = inject_adapter_in_model(lora(), tiny_models.make("llama"), adapter_name=SECOND)
    assert active_adapters(inner) == (SECOND,)


def test_a_batch_of_several_adapters_tells_one_for_each_row(model):
    told = []
    model.get_base_model().register_forward_pre_hook(lambda module, _: told.append(row_adapters(module)))
    inputs = tiny_models.prompts([5, 5, 5])
    names = [SECOND, "__base__", FIRST]
    with torch.no_grad():
        model(**inputs, adapter_names=names)
        model(**inputs)
    assert told == [tuple(names), None]
    generate(model, None, inputs, num_beams=2, adapter_names=names)
    assert told[2] == (SECOND, SECOND, "__base__", "__base__", FIRST, FIRST)


# transformers' own integration


def test_adapters_that_transformers_loaded_are_switched_between_calls(loaded, tmp_path):
    twin = copy.deepcopy(loaded)
    pool = hfpaged.PagedCache(loaded, num_blocks=99).pool
    seen = []
    for switch, names in [
        (lambda model: model.set_adapter(FIRST), (FIRST,)),
        (lambda model: model.set_adapter(SECOND), (SECOND,)),
        (lambda model: model.disable_adapters(), ()),
        (lambda model: model.enable_adapters(), (SECOND,)),
        (lambda model: model.set_adapter([FIRST, SECOND]), (FIRST, SECOND)),
    ]:
        switch(loaded)
        switch(twin)
        assert active_adapters(loaded) == names
        seen.append(generate(loaded, hfpaged.PagedCache(loaded, pool=pool)))
        assert seen[-1] == dynamic(twin)
    assert len({str(tokens) for tokens in seen}) == 4
    loaded.set_adapter(FIRST)
    loaded.save_pretrained(tmp_path)
    fresh = tiny_models.make("llama")
    fresh.load_adapter(str(tmp_path), adapter_name="third")
    assert active_adapters(fresh) == ("third",)
    assert paged(fresh.eval()) == seen[0]
    pool.check_integrity()


def test_an_adapter_from_a_folder(model, tmp_path):
    wanted = paged(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_models.make("llama"), tmp_path / FIRST, adapter_name="mine").eval()
    assert active_adapters(again) == ("mine",)
    assert paged(again) == wanted == dynamic(again)


# Learned prompts


def test_a_learned_prompt_comes_first(model):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    prompted = get_peft_model(tiny_models.make("llama"), config, adapter_name=FIRST).eval()
    assert active_adapters(prompted) == (FIRST,)
    with prompted.disable_adapter():
        assert active_adapters(prompted) == ()
    inputs = tiny_models.prompts([9, 9, 9])

    def logits(cache):
        with torch.no_grad():
            return prompted(**inputs, **{CACHE: cache}).logits

    wanted = logits(DynamicCache(config=prompted.config))
    torch.testing.assert_close(logits(hfpaged.PagedCache(prompted, num_blocks=99)), wanted)
