"""Run with the name of a case of tiny_models: its layers lie on two devices, dispatched by accelerate."""

from __future__ import annotations

import sys

import accelerate
import second_device
import tiny_models
import torch
from second_device import crossings
from transformers import DynamicCache

import hfpaged
from hfpaged import attention
from hfpaged.compat import cache_argument

CACHE = cache_argument()
NEAR, FAR = torch.device("cpu"), torch.device(second_device.NAME, 0)
PLACES = [NEAR, FAR, FAR, NEAR, FAR]
INPUTS = tiny_models.prompts([9, 4, 22])
WAYS = [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}]


def generate(model, cache, **way):
    return model.generate(**INPUTS, max_new_tokens=8, do_sample=False, **{CACHE: cache}, **way).tolist()


def on_two_devices(model):
    places = {f"model.layers.{index}": str(device) for index, device in enumerate(PLACES)}
    rest = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    return accelerate.dispatch_model(model, rest | places, main_device="cpu", force_hooks=True)


def check_tokens(model, wanted):
    for patched in (False, True):
        for way, tokens in zip(WAYS, wanted, strict=True):
            cache = hfpaged.PagedCache(model if patched else None, config=None if patched else model.config)
            assert generate(model, cache, **way) == tokens, (patched, way)
            assert [layer._store.key.device for layer in cache.layers] == PLACES
            assert [layer.keys.device for layer in cache.layers] == PLACES
            cache.pool.check_integrity()
    assert not attention.dense_calls, attention.dense_calls  # the masks stayed ours on their way


def check_crossings(model):
    """Block tables and slots go to a device once per step, however many layers are there; of beams nothing goes."""
    cache = hfpaged.PagedCache(model)
    with torch.no_grad():
        crossings.clear()
        model(**INPUTS, **{CACHE: cache})
        if model.config.model_type == "llama":  # no number is asked of a device by more than plain torch's kernels
            assert all(c.dtype.is_floating_point for c in crossings if not c.to_second), crossings
        mask = torch.cat([INPUTS["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
        crossings.clear()
        model(torch.tensor([[5], [6], [7]]), attention_mask=mask, **{CACHE: cache})
    whole = [c for c in crossings if c.to_second and not c.dtype.is_floating_point and c.shape != (1, 1)]  # positions
    groups = len(cache.pool.groups)
    assert len([c for c in whole if c.dtype == torch.int64 and c.shape == (3,)]) == groups, whole  # slots
    assert len([c for c in whole if c.dtype == torch.int32 and len(c.shape) == 2]) == groups, whole  # block tables
    assert len(whole) == 5 * groups, whole  # and lengths, starts, counts: all parts of a step
    crossings.clear()
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert not crossings, crossings
    indices = torch.tensor([0, 1, 2]).to(FAR)
    crossings.clear()
    cache.reorder_cache(indices)
    assert [c.to_second for c in crossings] == [False], crossings


name = sys.argv[1]
model = tiny_models.make(name, num_hidden_layers=len(PLACES))
wanted = [generate(model, DynamicCache(config=model.config), **way) for way in WAYS]
model = on_two_devices(model)
assert generate(model, DynamicCache(config=model.config)) == wanted[0]
check_tokens(model, wanted)
check_crossings(model)
print("same tokens")
