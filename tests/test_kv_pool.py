from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from hfpaged import pool_memory
from hfpaged.cache_stats import CacheStats
from hfpaged.errors import IntegrityError, InvalidConfigError, OutOfBlocksError
from hfpaged.kv_format import FORMATS
from hfpaged.kv_pool import KVPool
from hfpaged.kv_storage import GROWTH
from hfpaged.layer_groups import LayerGroup, group_layers
from hfpaged.pool_size import free_memory

HEADS, DIM, BLOCK_SIZE = 2, 8, 4
LAYER_BLOCK = BLOCK_SIZE * HEADS * 2 * DIM * 4  # bytes of one block of one layer: keys and values in float32


def pool_of(num_layers=2, groups=None, block_size=BLOCK_SIZE, **size):
    groups = groups or group_layers(dict.fromkeys(range(num_layers)))
    return KVPool(groups, block_size=block_size, kv_format=FORMATS["auto"], **size)


def arrive(pool, layer, heads=HEADS, dim=DIM):
    """The first key of a layer comes."""
    (place,) = (group.layers.index(layer) for group in pool.groups if layer in group.layers)
    store = pool.storage.store(place, *(torch.zeros(1, heads, 1, dim) for _ in range(2)), layer=0)
    pool.settle_size(layer, store)
    return store


def with_stores(pool):
    """The pool as it is after one step: all layers have come, room for all blocks that are out."""
    for layer in sorted(layer for group in pool.groups for layer in group.layers):
        arrive(pool, layer).reserve(pool.blocks.high_water, pool.num_blocks)
    return pool


def grown(pool, length):
    """A sequence of this length."""
    with pool.changing() as manager:
        sequence = manager.create()
        manager.grow([(sequence, length)])
    return sequence


TWO_GROUPS = (LayerGroup(None, (0, 1, 2)), LayerGroup(64, (3, 4)))


def test_a_pool_of_num_blocks_is_sized_at_once():
    pool = pool_of(num_blocks=7)
    assert (pool.num_blocks, pool.num_free) == (7, 7)
    with_stores(pool)
    assert pool.num_blocks == 7


@pytest.mark.parametrize("extra", [0, 1, 2 * LAYER_BLOCK - 1])
def test_memory_becomes_the_blocks_that_fit_once_the_first_key_is_known(extra):
    pool = pool_of(memory=10 * 2 * LAYER_BLOCK + extra)
    assert pool.num_blocks == 0
    with_stores(pool)
    assert pool.num_blocks == 10
    assert pool.num_free == 10


def test_memory_may_be_a_text():
    assert with_stores(pool_of(memory="1MiB")).num_blocks == 2**20 // (2 * LAYER_BLOCK)


def test_a_block_costs_as_much_as_the_layers_of_the_largest_group():
    pool = with_stores(pool_of(groups=TWO_GROUPS, memory=5 * 3 * LAYER_BLOCK))
    assert pool.num_blocks == 5
    pool.manager.grow([(pool.manager.create(), 8)])
    assert pool.num_free == 1
    assert with_stores(pool).stats().bytes_reserved == min(5, int(4 * GROWTH)) * 3 * LAYER_BLOCK


def test_a_full_pool_takes_no_more_than_its_memory():
    memory = 11 * 2 * LAYER_BLOCK + 5
    pool = with_stores(pool_of(memory=memory))
    sequence = pool.manager.create()
    for _ in range(11):
        pool.manager.grow([(sequence, BLOCK_SIZE)])
        assert with_stores(pool).stats().bytes_reserved <= memory
    with pytest.raises(OutOfBlocksError, match="1 more blocks are needed, 0 of the pool's 11"):
        pool.manager.grow([(sequence, 1)])


def test_layers_that_have_not_come_yet_count_like_the_one_that_comes():
    pool = pool_of(3, memory=120 * LAYER_BLOCK)
    counts = []
    for layer, heads in enumerate((HEADS, 4 * HEADS, 5 * HEADS)):
        arrive(pool, layer, heads)
        counts.append(pool.num_blocks)
    assert counts == [120 // 3, 120 // (1 + 4 + 4), 120 // (1 + 4 + 5)]


@pytest.mark.parametrize("heads", [(2, 8), (8, 2)])
def test_memory_is_the_most_a_pool_takes_when_layers_differ(heads):
    pool = pool_of(memory=100_000)
    stores = [arrive(pool, layer, heads=count) for layer, count in enumerate(heads)]
    for store in stores:
        store.reserve(pool.num_blocks, pool.num_blocks)
    stats = pool.stats()
    assert stats.bytes_reserved <= 100_000 < stats.bytes_reserved + pool.storage.block_bytes


def test_groups_of_other_shapes_have_stores_of_their_own_that_count():
    pool = pool_of(groups=(LayerGroup(None, (0,)), LayerGroup(64, (1,))), memory=100 * LAYER_BLOCK)
    arrive(pool, 0)
    assert pool.num_blocks == 100
    arrive(pool, 1, dim=4 * DIM)
    assert pool.num_blocks == 20


def test_a_layer_that_comes_again_changes_nothing():
    pool = with_stores(pool_of(memory=10 * 2 * LAYER_BLOCK))
    arrive(pool, 0)
    assert pool.num_blocks == 10


def test_a_pool_never_gets_smaller_than_what_is_out():
    pool = pool_of(memory=10 * 2 * LAYER_BLOCK)
    arrive(pool, 0)
    grown(pool, 9 * BLOCK_SIZE)
    arrive(pool, 1, heads=3 * HEADS)  # 5 blocks would fit now
    assert (pool.num_blocks, pool.num_free) == (9, 0)
    pool.check_integrity()


def test_a_pool_without_a_size_takes_half_of_the_memory_that_is_free(monkeypatch):
    asked = []
    monkeypatch.setattr(pool_memory, "free_memory", lambda device: asked.append(device) or 9 * 2 * LAYER_BLOCK * 2 + 1)
    pool = pool_of()
    assert pool.num_blocks == 0
    assert with_stores(pool).num_blocks == 9
    assert asked == [torch.device("cpu")]


def test_free_memory_of_the_cpu_is_a_positive_number_of_bytes():
    assert 2**20 < free_memory(torch.device("cpu")) < 2**60


def test_memory_that_holds_no_sequence_is_refused_with_the_numbers():
    pool = pool_of(groups=TWO_GROUPS, memory=1800)  # a block takes 3 * 512 bytes
    with pytest.raises(InvalidConfigError) as caught:
        with_stores(pool)
    assert str(caught.value).startswith("1.8 KiB hold 1 blocks of 1.5 KiB (4 tokens each); ")
    assert "at least 2" in str(caught.value)
    assert pool.num_blocks == 0


def test_memory_for_just_one_block_of_each_group_is_enough():
    assert with_stores(pool_of(groups=TWO_GROUPS, memory=2 * 3 * LAYER_BLOCK)).num_blocks == 2


def test_memory_and_num_blocks_together_are_refused():
    with pytest.raises(InvalidConfigError, match="memory='1GiB' and num_blocks=5 both say"):
        pool_of(memory="1GiB", num_blocks=5)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"num_blocks": 1}, "num_blocks=1 is too few .* at least 2"),
        ({"num_blocks": 0}, "num_blocks=0 is too few"),
        ({"memory": 0}, "memory=0 is 0 bytes"),
        ({"memory": "plenty"}, "memory='plenty' is no size"),
        ({"block_size": 12}, "block_size=12 is not a power of two"),
    ],
)
def test_sizes_that_cannot_work_are_refused_before_anything_is_allocated(size, words):
    with pytest.raises(InvalidConfigError, match=words):
        pool_of(groups=TWO_GROUPS, **size)


def test_an_empty_pool_has_no_waste():
    assert pool_of(num_blocks=3).stats() == CacheStats(
        blocks_total=3,
        blocks_used=0,
        blocks_free=3,
        blocks_shared=0,
        bytes_reserved=0,
        bytes_live=0,
        waste_ratio=0.0,
        tokens=0,
    )


def test_stats_say_what_blocks_and_bytes_the_tokens_take():
    pool = pool_of(num_blocks=20)
    pool.manager.grow([(pool.manager.create(), 10), (pool.manager.create(), 3)])
    stats = with_stores(pool).stats()
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_free, stats.blocks_shared) == (20, 4, 16, 0)
    assert stats.tokens == 13
    assert stats.waste_ratio == pytest.approx(3 / 16)
    assert stats.bytes_live == 13 * 2 * LAYER_BLOCK // BLOCK_SIZE
    assert stats.bytes_reserved == int(4 * GROWTH) * 2 * LAYER_BLOCK


def test_shared_blocks_and_their_tokens_count_once():
    pool = pool_of(num_blocks=20)
    parent = pool.manager.create()
    pool.manager.grow([(parent, 10)])
    children = [pool.manager.fork(parent) for _ in range(3)]
    alone = with_stores(pool).stats()
    assert (alone.blocks_used, alone.blocks_shared, alone.tokens) == (3, 3, 10)
    assert alone.waste_ratio == pytest.approx(2 / 12)
    pool.manager.grow([(children[0], 1)])
    stats = pool.stats()
    assert (stats.blocks_used, stats.blocks_shared, stats.tokens) == (4, 3, 13)
    assert stats.waste_ratio == pytest.approx(3 / 16)
    assert stats.bytes_live == 13 * 2 * LAYER_BLOCK // BLOCK_SIZE


def test_with_two_groups_a_token_counts_once_and_takes_bytes_in_both():
    pool = pool_of(groups=TWO_GROUPS, num_blocks=20)
    pool.manager.grow([(pool.manager.create(), 6)])
    stats = with_stores(pool).stats()
    assert (stats.blocks_used, stats.tokens) == (4, 6)
    assert stats.waste_ratio == pytest.approx(2 / 8)
    assert stats.bytes_live == 6 * (3 + 2) * LAYER_BLOCK // BLOCK_SIZE


def test_a_full_block_wastes_nothing():
    pool = pool_of(num_blocks=4)
    pool.manager.grow([(pool.manager.create(), 16)])
    assert with_stores(pool).stats().waste_ratio == 0
    assert pool.stats().bytes_live == 4 * 2 * LAYER_BLOCK


def test_the_text_of_a_pool_has_its_blocks():
    pool = pool_of(num_blocks=4)
    pool.manager.grow([(pool.manager.create(), 5)])
    assert repr(pool) == "KVPool(2 of 4 blocks of 4 tokens used)"
    assert pool.num_free == 2


def test_integrity_is_checked_over_all_sequences_of_the_pool():
    pool = pool_of(num_blocks=4)
    sequence = pool.manager.create()
    pool.manager.grow([(sequence, 5)])
    pool.check_integrity()
    pool.blocks.acquire(sequence.tables[0].blocks[0])
    with pytest.raises(IntegrityError):
        pool.check_integrity()


def test_bytes_live_are_those_of_every_layer_that_a_token_fills():
    pool = pool_of(groups=(LayerGroup(None, (0,)), LayerGroup(64, (1,))), num_blocks=100)
    arrive(pool, 0, dim=8)
    arrive(pool, 1, dim=32)  # another shape, so that the two groups share no store
    grown(pool, 4)
    assert pool.stats().bytes_live == 4 * 2 * HEADS * 4 * (8 + 32)


def test_numbers_are_read_while_nobody_changes_sequences():
    pool = pool_of(num_blocks=4)
    got = []
    reader = threading.Thread(target=lambda: got.append(pool.stats()))
    with pool.changing() as manager:
        reader.start()
        reader.join(timeout=0.1)
        assert not got
        manager.grow([(manager.create(), 5)])
    reader.join(timeout=10)
    assert got[0].blocks_used == 2


def test_a_change_that_fails_lets_the_next_one_in():
    pool = pool_of(num_blocks=4)
    with pytest.raises(OutOfBlocksError), pool.changing() as manager:
        manager.grow([(manager.create(), 100)])
    grown(pool, 5)
    assert pool.num_free == 2


def freeing(sequences):
    return lambda manager: [manager.free(sequence) for sequence in sequences]


def test_abandoned_sequences_are_free_at_once():
    pool = pool_of(num_blocks=4)
    sequences = [grown(pool, 5), grown(pool, 3)]
    pool.abandon(freeing(sequences))
    assert pool.blocks.num_free == 4
    pool.check_integrity()


def test_sequences_abandoned_in_the_middle_of_a_change_come_back_after_it():
    pool = pool_of(num_blocks=4)
    sequences = [grown(pool, 5), grown(pool, 3)]
    with pool.changing() as manager:
        pool.abandon(freeing(sequences))  # does not wait for the lock, which this very thread holds
        assert pool.num_free == 1
        manager.grow([(manager.create(), 1)])
    assert pool.num_free == 3
    pool.check_integrity()


def test_sequences_abandoned_in_the_middle_of_a_change_are_free_for_the_next_one():
    pool = pool_of(num_blocks=4)
    sequence = grown(pool, 13)
    with pool.changing():
        pool.abandon(freeing([sequence]))
    with pool.changing() as manager:
        manager.grow([(manager.create(), 16)])
    assert pool.num_free == 0
    pool.check_integrity()


def test_a_cache_that_the_garbage_collector_drops_in_the_middle_of_a_change_gives_its_blocks_back():
    pool = pool_of(num_blocks=4)

    class Cache:
        pass

    cache = Cache()
    cache.itself = cache  # so that only the collector frees it
    weakref.finalize(cache, pool.abandon, freeing([grown(pool, 9)]))
    del cache
    with pool.changing():
        gc.collect()
        assert pool.num_free == 1
    assert pool.num_free == 4


def test_a_dropped_cache_gives_its_blocks_back_whichever_thread_drops_it():
    pool = pool_of(num_blocks=4)
    thread = threading.Thread(target=pool.abandon, args=(freeing([grown(pool, 9)]),))
    with pool.changing():
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert pool.num_free == 4
