"""The debug mode of a pool: what is broken on purpose is found, with the block and its last transitions; what is not
broken gives the same tokens.
"""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from transformers import DynamicCache

from hfpaged import ContinuousBatcher, PagedCache, unpatch
from hfpaged.block_pool import BlockPool
from hfpaged.block_trace import HISTORY, TracedBlockManager, TracedBlockPool
from hfpaged.errors import IntegrityError, InvalidConfigError, InvalidLogitsError
from hfpaged.kv_format import FORMATS
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import LayerGroup
from hfpaged.part_store import PartStore

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"do_sample": False}
QUANTIZED = ["int8", "fp8_e4m3", "fp8_e5m2", "int4", "k8v4"]


@pytest.fixture
def model():
    model = tiny_models.shared("llama")
    yield model
    unpatch(model)


def filled_cache(model, tokens=11, **how):
    """A cache that has seen one prompt, its pool, and the block table of its row."""
    cache = PagedCache(model, block_size=4, num_blocks=32, debug=True, **how)
    cache.pool.abandon = lambda free: None  # a pool that was broken on purpose still is when its cache is collected
    ids = tiny_models.prompts([tokens])["input_ids"]
    model(input_ids=ids, past_key_values=cache)
    return cache, cache.pool, cache.pool.manager.sequences[0].tables[0]


def logits_after(model, cache):
    return model(input_ids=torch.tensor([[5]]), past_key_values=cache).logits


def told(error):
    """The line of each block in the text of an error."""
    lines = str(error.value).splitlines()[1:]
    return {int(line.split(":")[0].removeprefix("block ")): line for line in lines if line.startswith("block ")}


def chain(error):
    """All errors that led to this one, itself first."""
    error = error.value
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_a_refcount_too_many_is_told_with_the_history_of_that_block_alone(model):
    _, pool, table = filled_cache(model)
    block = table.blocks[1]
    pool.blocks.acquire(block)
    with pytest.raises(IntegrityError, match="refcounts and tables disagree") as error:
        pool.check_integrity()
    assert error.value.blocks == (block,)
    assert list(told(error)) == [block]
    assert "allocate by sequence 1 (cache), refcount 1" in told(error)[block]
    assert told(error)[block].endswith("acquire, refcount 2")


def test_a_lost_block_is_told_with_who_released_it(model):
    cache, pool, table = filled_cache(model)
    lost = list(table.blocks)
    cache.reset()
    pool.drop_prefixes()
    pool.blocks._released.remove(lost[0])
    with pytest.raises(IntegrityError, match="free list") as error:
        pool.check_integrity()
    assert list(told(error)) == [lost[0]]
    assert told(error)[lost[0]].endswith("release by sequence 1 (cache), refcount 0")


def test_a_block_that_is_released_twice_is_told_when_it_happens(model):
    cache, pool, table = filled_cache(model)
    block = table.blocks[-1]
    pool.blocks.release(block)
    with pytest.raises(IntegrityError, match=f"block {block} was released while it is free") as error:
        cache.reset()
    assert told(error)[block].endswith("release, refcount 0")


def test_a_step_over_a_freed_block_is_refused_before_it_reads(model):
    cache, pool, table = filled_cache(model)
    block = table.blocks[2]
    pool.blocks.release(block)
    with pytest.raises(IntegrityError) as error:
        logits_after(model, cache)
    # Giving the rows back fails on the same block then.
    assert any(f"is about to read blocks [{block}], which are free" in str(each) for each in chain(error))
    assert "release, refcount 0" in told(error)[block]


@pytest.mark.parametrize("fmt", ["auto", "float16", "bfloat16", *QUANTIZED])
def test_who_reads_a_freed_block_gets_nan_in_every_format(model, fmt, monkeypatch):
    monkeypatch.setattr(TracedBlockManager, "_check_held", lambda self, sequence: None)  # as if nobody had looked
    cache, pool, table = filled_cache(model, tokens=9, kv_dtype=fmt)  # two more need no new block
    assert not logits_after(model, cache).isnan().any()
    block = table.blocks[0]
    with pool.changing():
        pool.blocks.release(block)
    assert logits_after(model, cache).isnan().all()


def test_a_batcher_fails_the_request_that_reads_a_freed_block_and_names_it(model, monkeypatch):
    monkeypatch.setattr(TracedBlockManager, "_check_held", lambda self, sequence: None)
    batcher = ContinuousBatcher(model, block_size=4, num_blocks=32, debug=True, prefix_sharing=False)
    batcher.add_request([5, 6, 7, 8, 9], request_id="victim", max_new_tokens=20, **GREEDY)
    batcher.step()
    (sequence,) = batcher.pool.manager.sequences
    with batcher.pool.changing():
        block = sequence.tables[0].blocks[0]
        batcher.pool.blocks.release(block)
    batcher._finalizer.detach()
    (request,) = batcher.loop.requests.values()
    with pytest.raises(IntegrityError) as error:  # the release that comes with its end
        batcher.step()
    assert isinstance(request.error, InvalidLogitsError)
    assert "allocate by sequence 2 (victim), refcount 1; " in told(error)[block]


@pytest.mark.parametrize("fmt", ["auto", "int8", "int4"])
def test_a_write_into_a_freed_block_is_found_by_the_poison_that_is_gone(model, fmt):
    cache, pool, table = filled_cache(model, kv_dtype=fmt, prefix_sharing=False)
    blocks = list(table.blocks)
    cache.reset()
    pool.check_integrity()
    store = pool.layer_stores[1][0]
    store.contents("value")[blocks[1], 0].flatten()[3] = 1
    with pytest.raises(IntegrityError, match=rf"blocks \[{blocks[1]}\] were written after they were freed") as error:
        pool.check_integrity()
    assert list(told(error)) == [blocks[1]]


def test_cached_prefixes_are_not_poisoned_and_are_found_again(model):
    ids = tiny_models.prompts([21])["input_ids"]
    first = PagedCache(model, block_size=4, num_blocks=32, debug=True)
    expected = model.generate(ids, past_key_values=first, max_new_tokens=9, **GREEDY).tolist()
    pool = first.pool
    first.reset()
    assert pool.blocks.num_cached
    again = PagedCache(model, pool=pool, block_size=4)
    assert model.generate(ids, past_key_values=again, max_new_tokens=9, **GREEDY).tolist() == expected
    assert pool.stats().prefix_hits
    pool.check_integrity()


def test_blocks_that_are_handed_out_again_hold_no_poison(model):
    cache, pool, _ = filled_cache(model, prefix_sharing=False)
    cache.reset()
    (block,) = pool.blocks.allocate(1)
    for store in (pool.layer_stores[layer][0] for layer in (0, 1)):
        assert not store.contents("key")[block].any()
        assert not store.contents("value")[block].any()


@pytest.mark.parametrize("part", [1, 2], ids=["keys", "values"])
def test_ctrl_c_while_blocks_that_are_handed_out_are_cleared_loses_none(model, monkeypatch, part):
    ids = tiny_models.prompts([9])["input_ids"]
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=9, **GREEDY)
    cache = PagedCache(model, block_size=4, num_blocks=5, debug=True, prefix_sharing=False)  # all of them each time
    set_bytes, calls = PartStore.set_bytes, []

    def generate():
        tokens = model.generate(ids, past_key_values=cache, max_new_tokens=9, **GREEDY)
        cache.reset()
        return tokens

    def interrupted(store, blocks, byte):
        calls.append(byte)
        set_bytes(store, blocks, byte)
        if len(calls) == part:
            raise KeyboardInterrupt

    generate()
    monkeypatch.setattr(PartStore, "set_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate()
    cache.reset()
    cache.pool.check_integrity()
    assert torch.equal(generate(), expected)


def test_requests_are_named_and_steps_are_counted(model):
    with ContinuousBatcher(model, block_size=4, num_blocks=32, debug=True) as batcher:
        batcher.add_request([5, 6, 7, 8, 9], request_id="mine", max_new_tokens=3, n=2, do_sample=True)
        batcher.step()
        batcher.step()
        pool = batcher.pool
        shared = next(block for block in range(pool.blocks.high_water) if pool.blocks.refcount(block) == 2)
        names = {str(holder) for holder in pool.debug.holders(shared)}
        assert names == {"sequence 2 (mine sample 0)", "sequence 3 (mine sample 1)"}
        assert [step.step for step in pool.debug.history(shared)] == sorted(
            step.step for step in pool.debug.history(shared)
        )


def test_a_freed_block_is_handed_out_again_last():
    pool = TracedBlockPool(8)
    pool.allocate(4)
    for block in (2, 0, 3):
        pool.release(block)
    assert [pool.allocate(1) for _ in range(3)] == [[2], [0], [3]]


def test_the_ring_of_a_block_is_bounded():
    pool = TracedBlockPool(4)
    for step in range(50):
        pool.step = step
        pool.release(pool.allocate(1)[0])
    assert [(each.step, each.what) for each in pool.history(0)][-2:] == [(49, "allocate"), (49, "release")]
    assert len(pool.history(0)) == HISTORY
    assert list(pool._histories) == [0]


def test_copies_on_write_name_both_blocks(model):
    cache, pool, table = filled_cache(model)
    fork = copy.deepcopy(cache)
    logits_after(model, fork)
    source = table.blocks[-1]
    copied = next(each.what for each in pool.debug.history(source) if each.what.startswith("copy"))
    target = int(copied.removeprefix("copy to block "))
    assert f"copy from block {source}" in [each.what for each in pool.debug.history(target)]
    pool.check_integrity()


def test_off_is_the_plain_pool_and_the_environment_or_the_argument_turn_it_on(monkeypatch):
    def pool(**how):
        return KVPool((LayerGroup(None, (0,)),), block_size=4, kv_format=FORMATS["auto"], num_blocks=4, **how)

    monkeypatch.delenv("HFPAGED_DEBUG", raising=False)
    assert type(pool().blocks) is BlockPool
    assert pool().debug is None
    monkeypatch.setenv("HFPAGED_DEBUG", "1")
    assert type(pool().blocks) is TracedBlockPool
    assert pool(debug=False).debug is None
    monkeypatch.setenv("HFPAGED_DEBUG", "0")
    assert pool().debug is None
    assert pool(debug=True).debug is not None


def test_debug_beside_a_pool_that_is_not_is_refused(model):
    pool = PagedCache(model, block_size=4, num_blocks=8, debug=False).pool
    with pytest.raises(InvalidConfigError, match="the pool is not in debug mode"):
        PagedCache(model, pool=pool, debug=True)


def generated(model, name, debug, **how):
    settings = {"max_new_tokens": 14, **GREEDY} | how.pop("generate", {})
    cache = PagedCache(model, block_size=4, num_blocks=120, debug=debug, **how)
    batch = tiny_models.prompts([9, 30, 17])
    tokens = model.generate(**batch, past_key_values=cache, **settings).tolist()
    cache.pool.check_integrity()
    return tokens


CASES = {
    "plain": ("llama", {}),
    "beams": ("llama", {"generate": {"num_beams": 3}}),
    "int8": ("llama", {"kv_dtype": "int8"}),
    "int4": ("llama", {"kv_dtype": "int4"}),
    "windows": ("mistral", {}),
    "two groups": ("gemma2", {}),
    "streaming": ("llama", {"window": 8}),
    "dense views": ("bloom", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_same_with_it(case):
    name, how = CASES[case]
    model = tiny_models.shared(name)
    try:
        assert generated(model, name, True, **copy.deepcopy(how)) == generated(model, name, False, **how)
    finally:
        unpatch(model)


@pytest.mark.parametrize("fmt", ["auto", "int8", "int4"])
def test_a_batcher_that_preempts_gives_the_same_tokens_with_it(model, fmt):
    prompts = [[7, 8, 9] * 4 + [number] for number in range(3, 15)]
    runs = []
    for debug in (False, True):
        how = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 6, "kv_dtype": fmt, "debug": debug}
        with ContinuousBatcher(model, **how) as batcher:
            outputs = batcher.generate(prompts, max_new_tokens=16, **GREEDY)
            outputs += batcher.generate(prompts[:3], max_new_tokens=6, num_beams=2, **GREEDY)
            batcher.pool.check_integrity()
            assert sum(output.metrics.preemptions for output in outputs)
        runs.append([output.token_ids for output in outputs])
    assert runs[0] == runs[1]
