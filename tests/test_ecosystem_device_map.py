"""Models that accelerate spreads: over CPU memory and disk for real, and over two devices, one made in Python."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import tiny_models
import torch
from accelerate.hooks import remove_hook_from_submodules
from torch.utils import backend_registration
from transformers import AutoModelForCausalLM, DynamicCache

import hfpaged
from hfpaged import attention, compat
from hfpaged.handle import LazyTensor
from hfpaged.mask import LazyMask

CACHE = compat.cache_argument()
INPUTS = tiny_models.prompts([9, 4, 22])
WAYS = pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])


def generate(model, cache, **way):
    return model.generate(**INPUTS, max_new_tokens=8, do_sample=False, **{CACHE: cache}, **way).tolist()


def parts(model, first, last):
    """A device_map of the first layer, the last layer, and the CPU for the rest."""
    base = model.base_model_prefix
    layers = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[0].endswith((".layers", ".h"))}
    ends = {min(layers): first, max(layers): last}
    outside = [f"{base}.{name}" for name, _ in getattr(model, base).named_children() if name not in ("layers", "h")]
    return dict.fromkeys([*outside, *layers, "lm_head"], "cpu") | ends


SPREADS = {
    "all_in_cpu_memory": lambda model, folder: accelerate.cpu_offload(model, "cpu"),
    "all_on_disk": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
    "a_layer_on_disk": lambda model, folder: accelerate.dispatch_model(
        model, parts(model, "cpu", "disk"), main_device="cpu", offload_dir=folder, force_hooks=True
    ),
    "hooks_alone": lambda model, folder: accelerate.dispatch_model(
        model, parts(model, "cpu", "cpu"), main_device="cpu", force_hooks=True
    ),
}


# Windows and a soft cap; sinks; attention of its own: these in one spread, a plain model in all.
CASES = [("llama", spread) for spread in SPREADS] + [
    (name, "a_layer_on_disk") for name in ("gemma2", "gpt_oss", "falcon")
]


def num_hooks(model):
    return sum(hasattr(module, "_hf_hook") for module in model.modules())


@pytest.fixture(scope="module")
def expected():
    """Tokens of the models as they are, with transformers' own cache."""
    known = {}

    def look_up(name, way):
        key = name, str(way)
        if key not in known:
            model = tiny_models.shared(name)
            known[key] = generate(model, DynamicCache(config=model.config), **way)
        return known[key]

    return look_up


@WAYS
@pytest.mark.parametrize("order", ["patched_first", "spread_first", "unpatched"])
@pytest.mark.parametrize(("name", "spread"), CASES)
def test_a_spread_model_generates_what_it_did(name, spread, order, way, expected, tmp_path):
    model, wanted = tiny_models.make(name), expected(name, way)
    if order == "patched_first":
        hfpaged.patch(model)
    SPREADS[spread](model, tmp_path)
    hooks = num_hooks(model)
    assert hooks > 2
    if order == "spread_first":
        hfpaged.patch(model)
    before = dict(attention.dense_calls)
    cache = hfpaged.PagedCache(config=model.config, num_blocks=99)
    assert generate(model, cache, **way) == wanted
    assert attention.dense_calls == before
    stores_padding = name in tiny_models.OWN_ATTENTION or len(cache.pool.groups) > 1  # and windows let tokens go
    if order != "unpatched" and not way and not stores_padding:
        assert cache.stats().tokens == int(INPUTS["attention_mask"].sum()) + 3 * 7  # no padding: our hooks were called
    cache.pool.check_integrity()
    hfpaged.unpatch(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert num_hooks(model) == hooks
    assert generate(model, DynamicCache(config=model.config), **way) == wanted
    assert model.config._attn_implementation == tiny_models.shared(name).config._attn_implementation


@pytest.mark.parametrize("order", ["patched_first", "spread_first"])
def test_the_hooks_of_accelerate_go_and_ours_stay(order, expected, tmp_path):
    model = tiny_models.make("llama")
    for step in ("patch", "spread") if order == "patched_first" else ("spread", "patch"):
        if step == "patch":
            hfpaged.patch(model)
        else:
            SPREADS["a_layer_on_disk"](model, tmp_path)
    remove_hook_from_submodules(model)
    assert num_hooks(model) == 0
    cache = hfpaged.PagedCache(model, num_blocks=99)
    assert generate(model, cache) == expected("llama", {})
    assert cache.stats().tokens == int(INPUTS["attention_mask"].sum()) + 3 * 7


def test_arguments_without_names_are_understood_behind_the_hooks_of_accelerate():
    model = accelerate.cpu_offload(tiny_models.make("llama"), "cpu")
    cache = hfpaged.PagedCache(model, num_blocks=99)
    with torch.no_grad():
        model(INPUTS["input_ids"], INPUTS["attention_mask"], **{CACHE: cache})
    assert cache.stats().tokens == int(INPUTS["attention_mask"].sum())


def test_a_model_is_loaded_with_a_layer_on_disk(expected, tmp_path):
    plain = tiny_models.make("llama")
    plain.save_pretrained(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=parts(plain, "cpu", "disk"), offload_folder=tmp_path / "offloaded"
    )
    model.generation_config.eos_token_id = None
    assert num_hooks(model) > 2
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert generate(model, hfpaged.PagedCache(model, num_blocks=99)) == expected("llama", {})
    hfpaged.unpatch(model)
    assert generate(model, hfpaged.PagedCache(config=model.config, num_blocks=99)) == expected("llama", {})


def test_a_default_cache_of_a_spread_model(expected, tmp_path):
    model = SPREADS["all_on_disk"](tiny_models.make("llama"), tmp_path)
    with hfpaged.patched(model, default=True):
        output = model.generate(**INPUTS, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert isinstance(output.get(CACHE), hfpaged.PagedCache)
    assert output.sequences.tolist() == expected("llama", {})


def test_offloaded_weights_share_no_prefixes():
    """They are in no fingerprint: other weights in their place would find keys that are not theirs."""
    models = [tiny_models.make("llama"), tiny_models.make("llama")]
    with torch.no_grad():
        models[1].model.layers[0].self_attn.v_proj.weight.neg_()
    inputs = tiny_models.prompts([50])
    wanted = [model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist() for model in models]
    assert wanted[0] != wanted[1]
    pool = hfpaged.PagedCache(models[0], num_blocks=99).pool
    for model, tokens in zip(models, wanted, strict=True):
        accelerate.cpu_offload(model, "cpu")
        for _ in range(2):
            cache = hfpaged.PagedCache(model, pool=pool)
            assert model.generate(**inputs, max_new_tokens=8, do_sample=False, **{CACHE: cache}).tolist() == tokens
    pool.check_integrity()


# Two devices


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} cannot make a device in Python",
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_on_two_devices_keep_their_blocks_there(name):
    worker = Path(__file__).with_name("two_devices_worker.py")
    done = subprocess.run([sys.executable, worker, name], env=os.environ, capture_output=True, text=True, timeout=500)
    assert done.stdout.endswith("same tokens\n"), done.stdout + done.stderr[-3000:]


def test_a_mask_stays_lazy_on_its_way_to_another_device(monkeypatch):
    """meta stands for any device: what is made there has no numbers, so nothing may be made too early."""
    model = tiny_models.make("llama")
    made = []
    monkeypatch.setattr(LazyMask, "materialise", lambda self: made.append(self) or LazyTensor.materialise(self))
    masks = []
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    with torch.no_grad():
        model(**INPUTS, **{CACHE: hfpaged.PagedCache(model, num_blocks=99)})
    (mask,) = masks
    moved = mask.to("meta", non_blocking=True)
    assert isinstance(moved, LazyMask)
    assert moved.device.type == "meta"
    assert (moved.is_plain, moved.window, moved.shape) == (mask.is_plain, mask.window, mask.shape)
    assert mask.to("cpu") is mask
    assert not made
    monkeypatch.undo()
    assert moved.for_attention("sdpa").device.type == "meta"
    assert moved.for_attention("sdpa").shape == mask.for_attention("sdpa").shape
    assert moved.dense().device.type == "meta"
    assert moved.to("meta", torch.float32).dtype == torch.float32  # numbers are asked for: no longer lazy
    again = copy.copy(mask).on(torch.device("cpu"))
    assert torch.equal(again.dense(), mask.dense())
