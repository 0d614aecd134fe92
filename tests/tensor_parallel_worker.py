"""What each rank does for the tests of tensor parallelism: one case after the other, and what it found."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
import two_ranks
from safetensors.torch import load_file, save_file
from tensor_parallel_cases import FAMILIES, FORMATS, WAYS
from tiny_models import PLAIN
from transformers import AutoModelForCausalLM, DynamicCache

import hfpaged
from hfpaged import compat_sharding, pool_memory, prepack, ranks, same_tokens, tensor_parallel
from hfpaged.compat import cache_argument

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
FOLDER = Path(os.environ["RESULTS_FOLDER"])
CACHE = cache_argument()
INPUTS = tiny_models.prompts([13, 4, 22])  # the first one comes into a second block
LONG = tiny_models.prompts([50, 37], seed=3)

tiny_models.TABLE["llama_three"] = ("llama", PLAIN | {"num_attention_heads": 6, "num_key_value_heads": 3})
tiny_models.TABLE["mixtral"] = ("mixtral", PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2})
# transformers 5.17 splits a vocabulary only where it divides; prompts have smaller ids.
tiny_models.TABLE |= {name: (kind, sizes | {"vocab_size": 104}) for name, (kind, sizes) in tiny_models.TABLE.items()}
_loaded = {}


def folder_of(name):
    """Where the model of that name lies; rank 0 has written it."""
    folder = FOLDER / name
    if RANK == 0 and not folder.exists():
        tiny_models.shared(name).save_pretrained(folder)
    dist.barrier()
    return folder


def load(name):
    if name not in _loaded:
        _loaded[name] = tensor_parallel.load_model(folder_of(name)).requires_grad_(False)
        _loaded[name].generation_config.eos_token_id = None
    return _loaded[name]


def generate(model, cache, inputs=INPUTS, **way):
    settings = {"max_new_tokens": 6, "do_sample": False} | way
    return model.generate(**inputs, **{CACHE: cache}, **settings)


def tokens(model, cache, inputs=INPUTS, **way):
    return generate(model, cache, inputs, **way).tolist()


def plain(name, inputs=INPUTS, **way):
    """What one process with transformers' own cache says."""
    whole = tiny_models.shared(name)
    return tokens(whole, DynamicCache(config=whole.config), inputs, **way)


def heads(cache):
    return [store.signature[0] for stores in cache.pool.layer_stores.values() for store in stores]


def family(name):
    model = load(name)
    cache = hfpaged.PagedCache(model, num_blocks=64)
    found = tokens(model, cache)
    cache.pool.check_integrity()
    return {"paged": found, "plain": plain(name), "heads": heads(cache)}


def way(name="llama", lengths=(13, 4, 22), **settings):
    model, inputs = load(name), tiny_models.prompts(list(lengths))
    torch.manual_seed(7)
    wanted = plain(name, inputs, **settings)
    torch.manual_seed(7)
    cache = hfpaged.PagedCache(model, num_blocks=256)
    found = tokens(model, cache, inputs, **settings)
    cache.pool.check_integrity()
    return {"paged": found, "plain": wanted}


def kv_format(name, kv_dtype):
    """Of quantized keys the judge is one process with the same format."""
    whole, model = tiny_models.shared(name), load(name)
    with hfpaged.patched(whole):
        wanted = tokens(whole, hfpaged.PagedCache(whole, num_blocks=64, kv_dtype=kv_dtype))
    cache = hfpaged.PagedCache(model, num_blocks=64, kv_dtype=kv_dtype)
    return {"paged": tokens(model, cache), "plain": wanted, "format": cache.pool.kv_format.title}


def window():
    """A cache that forgets."""
    whole, model = tiny_models.shared("llama"), load("llama")
    with hfpaged.patched(whole):
        wanted = tokens(whole, hfpaged.PagedCache(whole, window=16), max_new_tokens=30)
    return {"paged": tokens(model, hfpaged.PagedCache(model, window=16), max_new_tokens=30), "plain": wanted}


def prefixes():
    model = load("llama")
    pool = hfpaged.PagedCache(model, num_blocks=256).pool
    found = [tokens(model, hfpaged.PagedCache(model, pool=pool), LONG) for _ in range(2)]
    first = pool.stats().prefix_hits
    rows = {name: given[:1, -40:] for name, given in LONG.items()}  # the last tokens of a known prompt: nothing known
    found.append(tokens(model, hfpaged.PagedCache(model, pool=pool), rows))
    pool.check_integrity()
    wanted = [plain("llama", LONG)] * 2 + [plain("llama", rows)]
    return {"paged": found, "plain": wanted, "hits": first, "then": pool.stats().prefix_hits}


def eviction():
    """A small pool: what is known is evicted in the same order on all ranks."""
    model = load("llama")
    pool = hfpaged.PagedCache(model, num_blocks=11).pool
    found, wanted, hits = [], [], []
    for seed in (1, 2, 3, 1, 3, 2, 1):
        inputs = tiny_models.prompts([60], seed=seed)
        found.append(tokens(model, hfpaged.PagedCache(model, pool=pool), inputs))
        wanted.append(plain("llama", inputs))
        hits.append(pool.stats().prefix_hits)
    pool.check_integrity()
    return {"paged": found, "plain": wanted, "hits": hits, "evictions": pool.stats().prefix_evictions}


def chat():
    """Go on with a cache, fork it, go on with both, and cut one of them back."""
    model, whole = load("llama"), tiny_models.shared("llama")
    found = []
    for which, cache in ((model, hfpaged.PagedCache(model)), (whole, DynamicCache(config=whole.config))):
        first = generate(which, cache, {"input_ids": LONG["input_ids"][:1]})
        fork = copy.deepcopy(cache)
        again = [torch.cat([first, torch.tensor([[number, 5, 6]])], dim=1) for number in (7, 8)]
        both = [tokens(which, each, {"input_ids": ids}) for each, ids in zip((cache, fork), again, strict=True)]
        fork.crop(-20)
        short = torch.tensor(both[1])[:, : fork.get_seq_length() + 1]
        found.append([both, tokens(which, fork, {"input_ids": short})])
        if which is model:
            cache.pool.check_integrity()
    return {"paged": found[0], "plain": found[1]}


def default_cache():
    """generate() that names no cache."""
    model = load("llama")
    hfpaged.unpatch(model)  # other cases have patched it for good
    with hfpaged.patched(model, default=True):
        found = model.generate(**INPUTS, max_new_tokens=6, do_sample=False).tolist()
    assert not hfpaged.patching.is_patched(model)
    unpatched = model.generate(**INPUTS, max_new_tokens=6, do_sample=False).tolist()
    return {"paged": [found, unpatched], "plain": [plain("llama")] * 2}


def pool_bytes():
    whole, model = tiny_models.shared("llama"), load("llama")
    told = {}
    for kv_dtype in ("auto", "int8"):
        pools = [hfpaged.PagedCache(each, num_blocks=32, kv_dtype=kv_dtype).pool for each in (whole, model)]
        for each, pool in zip((whole, model), pools, strict=True):
            tokens(each, hfpaged.PagedCache(each, pool=pool))
        hfpaged.unpatch(whole)
        told[kv_dtype] = [pool.storage.nbytes for pool in pools]
    return told


def replicated_bytes():
    whole, model = tiny_models.shared("llama_mqa"), load("llama_mqa")
    with hfpaged.patched(whole):
        caches = [hfpaged.PagedCache(each, num_blocks=32) for each in (whole, model)]
        for each, cache in zip((whole, model), caches, strict=True):
            tokens(each, cache)
    return [cache.pool.storage.nbytes for cache in caches]


def sizes():
    """Ranks that see different amounts of free memory have pools of one size."""
    model = load("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_memory, "free_memory", lambda device: (3 - RANK) * 2**20)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        caches = [hfpaged.PagedCache(model), hfpaged.PagedCache(model, memory="300KB")]
        for cache in caches:
            tokens(model, cache)
    blocks = [cache.pool.num_blocks for cache in caches]
    return {
        "blocks": blocks,
        "block_bytes": caches[0].pool.storage.block_bytes,
        "max": caches[0].pool.blocks.max_cached,
    }


def told():
    model = load("llama")
    cache = hfpaged.PagedCache(model, num_blocks=32)
    tokens(model, cache)
    stats = cache.stats()
    return {"stats": [stats.rank, stats.num_ranks], "pool": str(cache.pool), "cache": str(cache)}


def saved_prefixes():
    model, whole = load("llama"), tiny_models.shared("llama")
    path = FOLDER / "prefixes.safetensors"
    pool = hfpaged.PagedCache(model, num_blocks=64).pool
    tokens(model, hfpaged.PagedCache(model, pool=pool), LONG)
    written = pool.save_prefixes(path)
    dist.barrier()
    files = sorted(each.name for each in FOLDER.glob("prefixes.*"))
    fresh = hfpaged.PagedCache(model, num_blocks=64).pool
    loaded = fresh.load_prefixes(path)
    found = tokens(model, hfpaged.PagedCache(model, pool=fresh), LONG)
    fresh.check_integrity()
    other = FOLDER / f"other.rank{RANK}-of-2.safetensors"  # in it: what the other rank saved
    shutil.copy(FOLDER / f"prefixes.rank{1 - RANK}-of-2.safetensors", other)
    errors = []
    with hfpaged.patched(whole):
        alone = hfpaged.PagedCache(whole, num_blocks=64).pool
        own = FOLDER / f"whole{RANK}.safetensors"
        tokens(whole, hfpaged.PagedCache(whole, pool=alone), LONG)
        alone.save_prefixes(own)
        shutil.copy(own, ranks.path_of_rank(own, fresh.ranks))
        for pool, file in ((fresh, FOLDER / "other.safetensors"), (alone, other), (fresh, own)):
            with pytest.raises(hfpaged.PrefixFileError) as raised:
                pool.load_prefixes(file)
            errors.append(str(raised.value))
    return {
        "paged": found, "plain": plain("llama", LONG), "files": files, "hits": fresh.stats().prefix_hits,
        "blocks": [written.blocks, loaded.blocks], "errors": errors,
    }  # fmt: skip


def other_prompts():
    """Both ranks raise, and go on with what comes next."""
    model = load("llama")
    cache = hfpaged.PagedCache(model, num_blocks=64)
    with pytest.raises(hfpaged.RanksDifferError) as raised:
        tokens(model, cache, tiny_models.prompts([9], seed=RANK))
    return {"paged": tokens(model, hfpaged.PagedCache(model, pool=cache.pool)), "plain": plain("llama"),
            "error": str(raised.value)}  # fmt: skip


def other_seeds():
    model = load("llama")
    torch.manual_seed(RANK)
    cache = hfpaged.PagedCache(model, num_blocks=64)
    with pytest.raises(hfpaged.RanksDifferError) as raised:
        tokens(model, cache, do_sample=True, temperature=3.0, max_new_tokens=40)
    cache.pool.check_integrity()
    return str(raised.value)


def other_caches():
    """Each of these would have the ranks exchange other things, or compute with keys that do not go together."""
    model, errors = load("llama"), []
    for unlike in ({"kv_dtype": "int8"}, {"block_size": 32}, {"prefix_sharing": False}, {"window": 16}):
        cache = hfpaged.PagedCache(model, num_blocks=64, **(unlike if RANK else {}))
        with pytest.raises(hfpaged.RanksDifferError) as raised:
            tokens(model, cache)
        cache.pool.check_integrity()
        errors.append(str(raised.value))
    found = tokens(model, hfpaged.PagedCache(model, num_blocks=64))
    return {"paged": found, "plain": plain("llama"), "errors": errors}


def config_cache():
    """A cache that was made of a config learns of the ranks by the model that uses it."""
    model = hfpaged.patch(load("llama"))
    pool = hfpaged.PagedCache(config=model.config, num_blocks=64).pool
    found = [tokens(model, hfpaged.PagedCache(config=model.config, pool=pool), LONG)]
    if RANK == 1:
        assert pool.drop_prefixes()
    found.append(tokens(model, hfpaged.PagedCache(config=model.config, pool=pool), LONG))
    with pytest.raises(hfpaged.InvalidConfigError) as refused:
        tokens(model, hfpaged.PagedCache(config=model.config, num_blocks=64, swap_space="1MiB"))
    return {"paged": found, "plain": [plain("llama", LONG)] * 2, "refused": str(refused.value)}


def waiting():
    """The other rank comes when this one has said that it waits."""
    model, said, told = load("llama"), [], FOLDER / "told"

    def tell(text, *parts):
        said.append(text % parts)
        told.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "PATIENCE", 0.1)
        patch.setattr(ranks.logger, "warning", tell)
        while RANK == 1 and not told.exists():
            time.sleep(0.02)
        found = tokens(model, hfpaged.PagedCache(model, num_blocks=64))
    return {"paged": found, "plain": plain("llama"), "said": said}


def pools_differ():
    """What one rank alone has forgotten is computed again by all; and each says why as it can."""
    model = load("llama")
    pool = hfpaged.PagedCache(model, num_blocks=64).pool
    tokens(model, hfpaged.PagedCache(model, pool=pool), LONG)
    if RANK == 1:
        assert pool.drop_prefixes()
    before = pool.stats().prefix_hits
    cache = hfpaged.PagedCache(model, pool=pool)
    found = tokens(model, cache, LONG)
    reports = cache.explain_last()
    pool.check_integrity()
    hits = pool.stats().prefix_hits - before
    return {"paged": found, "plain": plain("llama", LONG), "hits": hits, "reports": [str(each) for each in reports]}


def garbage():
    """A cache in a circle of references, which only one rank has collected yet."""
    model = load("llama")
    pool = hfpaged.PagedCache(model, num_blocks=12).pool  # too small for two batches
    gc.collect()
    gc.disable()
    try:
        cache = hfpaged.PagedCache(model, pool=pool, prefix_sharing=False)
        tokens(model, cache, LONG)
        cache.circle = cache
        del cache
        if RANK == 1:
            gc.collect()
        free = pool.num_free
        found = [tokens(model, hfpaged.PagedCache(model, pool=pool), tiny_models.prompts([50, 37], seed=4))]
    finally:
        gc.enable()
    wanted = [plain("llama", tiny_models.prompts([50, 37], seed=4))]
    return {"paged": found, "plain": wanted, "free": free, "told": pool in same_tokens._told}


def garbage_in_a_chat():
    """The same, before a chat goes on."""
    model, whole = load("llama"), tiny_models.shared("llama")
    pool = hfpaged.PagedCache(model, num_blocks=11).pool
    chat, alone = hfpaged.PagedCache(model, pool=pool, prefix_sharing=False), DynamicCache(config=whole.config)
    gc.collect()
    gc.disable()
    try:
        other = hfpaged.PagedCache(model, pool=pool, prefix_sharing=False)
        first = tokens(model, chat, tiny_models.prompts([20]))
        tokens(whole, alone, tiny_models.prompts([20]))
        tokens(model, other, tiny_models.prompts([60]))
        other.circle = other
        del other
        if RANK == 1:
            gc.collect()
        free, then = pool.num_free, {"input_ids": torch.tensor([[*first[0], *range(3, 80)]])}
        return {"paged": tokens(model, chat, then), "plain": tokens(whole, alone, then), "free": free}
    finally:
        gc.enable()


def pinned():
    """One rank alone keeps a prefix from eviction: that is told once, and nobody waits for anybody."""
    model = load("llama")
    pool = hfpaged.PagedCache(model, num_blocks=32).pool
    found = [tokens(model, hfpaged.PagedCache(model, pool=pool), LONG)]
    if RANK == 1:
        assert pool.pin_prefix(LONG["input_ids"][0]) == 48
    warnings = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_tokens.logger, "warning", lambda text, *numbers: warnings.append(text % numbers))
        found += [tokens(model, hfpaged.PagedCache(model, pool=pool), LONG) for _ in range(2)]
    return {"paged": found, "plain": [plain("llama", LONG)] * 3, "warnings": warnings}


def too_small():
    """All ranks find out together that a pool is too small, and go on with what fits."""
    model = load("llama")
    pool = hfpaged.PagedCache(model, num_blocks=4).pool
    with pytest.raises(hfpaged.OutOfBlocksError) as raised:
        tokens(model, hfpaged.PagedCache(model, pool=pool), max_new_tokens=60)
    found = tokens(model, hfpaged.PagedCache(model, pool=pool), tiny_models.prompts([20]))
    pool.check_integrity()
    return {"paged": found, "plain": plain("llama", tiny_models.prompts([20])), "error": str(raised.value)}


def prepacked():
    """Weights that are parts of others stay as they are, each for a reason that is told."""
    model = load("llama")
    report = prepack.prepack(model)
    found = tokens(model, hfpaged.PagedCache(model, num_blocks=64))
    prepack.unprepack(model)
    return {"paged": found, "plain": plain("llama"), "report": str(report), "layers": report.layers}


def refusals():
    errors = {}
    auto = AutoModelForCausalLM.from_pretrained(
        folder_of("llama_mqa"), distributed_config=compat_sharding.distributed_config(None)
    )
    sequence = copy.copy(load("llama"))
    sequence._tp_plan = sequence._tp_plan | {"model.norm": "sequence_parallel"}
    spread = copy.deepcopy(tiny_models.shared("llama"))
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    weight = dist.tensor.distribute_tensor(spread.lm_head.weight.data, mesh, [dist.tensor.Shard(0)])
    spread.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    for name, model in {"heads": auto, "sequence": sequence, "others": spread}.items():
        with pytest.raises(hfpaged.UnsupportedModelError) as raised:
            hfpaged.PagedCache(model)
        errors[name] = str(raised.value)
    with pytest.raises(hfpaged.InvalidConfigError) as refused:
        hfpaged.PagedCache(load("llama"), kv_scales=object.__new__(hfpaged.kv_scales.KVScales))
    with pytest.raises(hfpaged.CheckpointError) as lacking:
        tensor_parallel.load_model(_without_a_layer(folder_of("llama")))
    return errors | {"scales": str(refused.value), "lacking": str(lacking.value)}


def _without_a_layer(folder):
    other = folder.with_name("without_a_layer")
    if RANK == 0:
        shutil.copytree(folder, other)
        weights = {key: value for key, value in load_file(other / "model.safetensors").items() if "layers.1" not in key}
        save_file(weights, other / "model.safetensors", {"format": "pt"})
    dist.barrier()
    return other


def host_group():
    own = tensor_parallel.ranks_of(load("llama"))
    made = own.host_group
    assert made is own.host_group is not own.group
    return ranks.ranges(own, [RANK, 5])


CASES = {
    **{f"family {name}": partial(family, name) for name in FAMILIES},
    **{f"way {name}": partial(way, **settings) for name, settings in WAYS.items()},
    **{f"format {name}": partial(kv_format, "llama", name) for name in FORMATS},
    **{
        case.__name__: case
        for case in (
            window, prefixes, eviction, chat, default_cache, pool_bytes, replicated_bytes, sizes, told, saved_prefixes,
            other_prompts, other_seeds, other_caches, config_cache, waiting, pools_differ, garbage,
            garbage_in_a_chat, pinned, too_small, prepacked, refusals, host_group,
        )
    },
}  # fmt: skip


def version():
    return transformers.__version__


if __name__ == "__main__":
    chosen = sys.argv[1:] or CASES  # all of them, or those that are named
    two_ranks.report({name: CASES.get(name, version) for name in chosen})
