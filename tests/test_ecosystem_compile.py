"""torch.compile around a patched model: its graph breaks at our functions, which run as they are."""

from __future__ import annotations

import logging

import pytest
import tiny_models
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from transformers import DynamicCache

import hfpaged
from hfpaged import attention, compat
from hfpaged.patching import is_patched

CACHE = compat.cache_argument()
INPUTS = tiny_models.prompts([9, 4, 22])


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would collect each guard
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    return tiny_models.make("llama")


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def forward_alone(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


COMPILE = {"wrapped": wrapped, "in_place": in_place, "forward_alone": forward_alone}


def generate(model, cache, **way):
    return model.generate(**INPUTS, max_new_tokens=8, do_sample=False, **{CACHE: cache}, **way).tolist()


def decode(model, cache, steps=6):
    """Greedy by hand: generate() of a model that torch.compile() wrapped calls the model inside, not compiled."""
    ids, mask, tokens = INPUTS["input_ids"], INPUTS["attention_mask"], []
    with torch.no_grad():
        for _ in range(steps):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=True, **{CACHE: cache}).logits
            ids = logits[:, -1:].argmax(dim=-1)
            tokens.append(ids)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return torch.cat(tokens, dim=1).tolist()


def dynamic(model):
    return DynamicCache(config=model.config)


def graphs_and_reasons():
    return counters["stats"]["unique_graphs"], " ".join(counters["graph_break"])


@pytest.mark.parametrize(
    ("how", "backend", "patched"),
    [
        ("wrapped", "eager", True),
        ("in_place", "aot_eager", True),
        ("forward_alone", "eager", True),
        ("in_place", "aot_eager", False),
    ],
)
def test_a_compiled_model_generates_what_it_did(model, how, backend, patched):
    wanted = (
        generate(model, dynamic(model)),
        generate(model, dynamic(model), num_beams=3),
        decode(model, dynamic(model)),
    )
    if patched:
        hfpaged.patch(model)
    compiled = COMPILE[how](model, backend)
    before = dict(attention.dense_calls)
    caches = [hfpaged.PagedCache(config=model.config, num_blocks=99) for _ in wanted]
    assert decode(compiled, caches[0]) == wanted[2]
    graphs, reasons = graphs_and_reasons()
    assert graphs > 2  # it was compiled
    assert "update" in reasons
    assert ("paged_attention" in reasons) == patched
    assert generate(compiled, caches[1]) == wanted[0]
    assert generate(compiled, caches[2], num_beams=3) == wanted[1]
    assert attention.dense_calls == before
    for cache in caches:
        cache.pool.check_integrity()


def test_no_step_is_compiled_anew_for_its_length(model):
    compiled = wrapped(hfpaged.patch(model), "eager")
    cache = hfpaged.PagedCache(model, num_blocks=99)
    decode(compiled, cache, steps=4)
    known = counters["stats"]["unique_graphs"]
    decode(compiled, hfpaged.PagedCache(model, num_blocks=99), steps=20)
    assert counters["stats"]["unique_graphs"] == known


def test_a_wrapped_model_is_its_model(model):
    wanted = decode(model, dynamic(model))
    compiled = wrapped(model, "eager")
    cache = hfpaged.PagedCache(compiled, num_blocks=99)
    assert is_patched(model)
    assert decode(compiled, cache) == wanted
    assert hfpaged.unpatch(compiled) is compiled
    assert not is_patched(model)
    assert not model._forward_pre_hooks


def test_patch_and_unpatch_of_a_model_that_has_run_compiled(model):
    wanted = decode(model, dynamic(model))
    compiled = in_place(model, "eager")
    for patched in (False, True, False):
        (hfpaged.patch if patched else hfpaged.unpatch)(model)
        cache = hfpaged.PagedCache(config=model.config, num_blocks=99)
        assert decode(compiled, dynamic(model)) == wanted
        assert decode(compiled, cache) == wanted
        padding = int((INPUTS["attention_mask"] == 0).sum())
        assert cache.stats().tokens == INPUTS["input_ids"].numel() + 3 * 5 - (padding if patched else 0)


def test_a_failed_step_of_a_compiled_model_is_undone(model):
    wanted = decode(model, dynamic(model))
    compiled = in_place(hfpaged.patch(model), "eager")
    cache = hfpaged.PagedCache(model, num_blocks=99)
    with torch.no_grad():
        model(**tiny_models.prompts([9, 9, 9]), **{CACHE: cache})
        length = cache.get_seq_length()
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        torch._dynamo.reset()
        with pytest.raises(ZeroDivisionError):
            compiled(torch.tensor([[5], [6], [7]]), **{CACHE: cache})
        handle.remove()
        torch._dynamo.reset()
    cache.pool.check_integrity()
    assert cache.get_seq_length() == length
    cache.reset()
    assert decode(compiled, cache) == wanted


def test_one_graph_without_breaks_is_refused_by_torch_and_the_cache_stays_whole(model):
    """Block tables change from step to step and live in Python; torch names our function as the reason."""
    wanted = decode(model, dynamic(model))
    compiled = torch.compile(hfpaged.patch(model), backend="eager", fullgraph=True)
    cache = hfpaged.PagedCache(model, num_blocks=99)
    with pytest.raises(Unsupported, match=r"torch\.compiler\.disable"):
        decode(compiled, cache)
    cache.pool.check_integrity()
    assert decode(model, cache) == wanted


def test_generate_compiles_nothing_of_its_own_accord(model, monkeypatch):
    """On a GPU it would, for caches that say that they can be compiled."""
    cache = hfpaged.PagedCache(model, num_blocks=99)
    assert cache.is_compileable is False
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    generate(model, cache)
    assert counters["stats"]["unique_graphs"] == 0


def test_a_model_with_windows_and_a_soft_cap_compiled():
    model = tiny_models.make("gemma2")
    wanted = generate(model, dynamic(model))
    hfpaged.patch(model)
    cache = hfpaged.PagedCache(model, num_blocks=99)
    assert generate(in_place(model, "eager"), cache) == wanted
    assert counters["stats"]["unique_graphs"] > 2
    cache.pool.check_integrity()
