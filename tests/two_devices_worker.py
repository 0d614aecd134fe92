"""Run with the name of a case of tiny_models: its layers lie on two devices, dispatched by accelerate."""

from __future__ import annotations

import sys
import tempfile

import accelerate
import pytest
import second_device
import tiny_models
import torch
from second_device import crossings
from transformers import DynamicCache

import hfpaged
from hfpaged import ContinuousBatcher, attention, pool_size
from hfpaged.compat import cache_argument
from hfpaged.engine import sizing
from hfpaged.restore_costs import RestoreCosts

CACHE = cache_argument()
NEAR, FAR = torch.device("cpu"), torch.device(second_device.NAME, 0)
PLACES = [NEAR, FAR, FAR, NEAR, FAR]
OTHER_PLACES = [FAR, NEAR, FAR, NEAR, FAR]  # as many layers on each
PROMPTS = [list(range(3, 60)), list(range(3, 40)), [5, 6, 7]]
INPUTS = tiny_models.prompts([9, 4, 22])
WAYS = [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}]


def generate(model, cache, **way):
    return model.generate(**INPUTS, max_new_tokens=8, do_sample=False, **{CACHE: cache}, **way).tolist()


def on_two_devices(model, order=PLACES):
    places = {f"model.layers.{index}": str(device) for index, device in enumerate(order)}
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


def batched(batcher):
    """Requests that share a prefix, and beams, whose blocks are copied on write."""
    greedy = batcher.generate(PROMPTS, max_new_tokens=8, do_sample=False)
    beams = batcher.generate(PROMPTS[:1], max_new_tokens=8, do_sample=False, num_beams=3, num_return_sequences=2)
    batcher.pool.check_integrity()
    assert batcher.pool.num_free == batcher.pool.num_blocks
    return [list(each.token_ids) for output in (*greedy, *beams) for each in output.sequences]


def check_batcher(name, plain, model):
    """Tokens, block tables that go to a device once per step, and prefixes in a file and in a pool for two layouts."""
    settings = {"num_blocks": 200, "prepack": False}
    for kv_dtype in ("int8", "auto") if name == "llama" else ("auto",):
        with ContinuousBatcher(plain, kv_dtype=kv_dtype, **settings) as batcher:
            wanted = batched(batcher)
        with ContinuousBatcher(model, kv_dtype=kv_dtype, **settings) as batcher:
            assert batched(batcher) == wanted, kv_dtype
            assert batcher.describe()["devices"] == "cpu, second:0 x 2, cpu, second:0"
            check_copies(batcher)
    with tempfile.TemporaryDirectory() as folder:
        saved = batcher.pool.save_prefixes(f"{folder}/prefixes").blocks
        assert saved >= 4
        for order in (PLACES, OTHER_PLACES):
            other = on_two_devices(make(name), order)
            cache = hfpaged.PagedCache(other, num_blocks=200)  # which has not seen a key
            assert cache.pool.load_prefixes(f"{folder}/prefixes").blocks == saved
            assert [cache.pool.layer_stores[layer][0].key.device for layer in range(len(order))] == order
            for pool in (batcher.pool, cache.pool):
                with ContinuousBatcher(other, pool=pool, prepack=False) as second:
                    assert batched(second) == wanted, order


def check_swapping(plain, model):
    """Two prompts that evict each other come back to the devices on which they lay."""
    prompts = [list(range(3, 60)), list(range(60, 3, -1))]
    settings = {"max_new_tokens": 6, "do_sample": False}
    with ContinuousBatcher(plain, num_blocks=200, prepack=False) as batcher:
        wanted = [output.token_ids for output in batcher.generate(prompts, **settings)]
    RestoreCosts.pays = lambda self, tokens, nbytes: True
    blocks = 5 * len(batcher.pool.groups)
    with ContinuousBatcher(model, num_blocks=blocks, swap_space="1MiB", max_num_seqs=1, prepack=False) as batcher:
        for number in (0, 1, 0, 1, 0):
            (output,) = batcher.generate(prompts[number], **settings)
            assert output.token_ids == wanted[number]
            batcher.pool.check_integrity()
        assert output.num_cached_tokens >= 48
        assert batcher.pool.stats().restored_tokens >= 48


def check_copies(batcher):
    names = [batcher.add_request(prompt, max_new_tokens=4, do_sample=False) for prompt in PROMPTS]
    for _ in range(3):
        crossings.clear()
        batcher.step()
        tables = [c for c in crossings if c.to_second and c.dtype == torch.int32 and len(c.shape) == 2]
        assert len(tables) == len(batcher.pool.groups), tables
    for request in names:
        batcher.abort(request)


def check_sizes(model):
    """A share is of each device: the second one has little."""
    real = pool_size.device_memory
    little = 2 * 2**20

    def memory(device):
        return (little, little) if device == FAR else real(device)

    sizing.device_memory = memory
    sizing._peak_resident = lambda run: (run() and 0) or 2**17
    batcher = ContinuousBatcher(model, memory=0.5, max_num_batched_tokens=sizing.TRIAL_TOKENS_ON_CPU, prepack=False)
    sizes = batcher.pool.storage.block_bytes_by_device
    left = little // 2 - 2**17
    assert left - sizes[FAR] < batcher.pool.num_blocks * sizes[FAR] <= left, batcher.describe()["sizing"]
    assert "second:0: 50% of 2.0 MiB, less 0 B in use" in batcher.describe()["sizing"]
    batcher.close()
    little = 1000
    with pytest.raises(hfpaged.InvalidConfigError, match=r"^second:0: 50% of 1000 B"):
        ContinuousBatcher(model, memory=0.5, prepack=False)


def make(name):
    return tiny_models.make(name, num_hidden_layers=len(PLACES))


name = sys.argv[1]
plain = make(name)
model = make(name)
wanted = [generate(model, DynamicCache(config=model.config), **way) for way in WAYS]
model = on_two_devices(model)
assert generate(model, DynamicCache(config=model.config)) == wanted[0]
check_tokens(model, wanted)
check_crossings(model)
check_batcher(name, plain, model)
check_swapping(plain, model)
check_sizes(model)
print("same tokens")
