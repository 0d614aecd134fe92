"""Contents of blocks as rows of bytes: what is taken out of a pool is what is put back, in every KV format."""

from __future__ import annotations

import pytest
import torch

from hfpaged.block_rows import BlockRows
from hfpaged.kv_format import FORMATS
from hfpaged.kv_storage import KVStorage
from hfpaged.layer_groups import LayerGroup

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = (LayerGroup(None, (0, 2)), LayerGroup(8, (1,)))


def make_stores(kv_format="auto", block_size=4, dtype=torch.bfloat16, heads=(2, 2, 1)):
    """One store for each of three layers, ten blocks of random bytes in each."""
    storage = KVStorage(block_size, FORMATS[kv_format])
    stores = {}
    for group in GROUPS:
        for place, layer in enumerate(group.layers):
            key, value = (torch.zeros(1, heads[layer], 0, dim, dtype=dtype) for dim in (16, 32))
            stores[layer] = [storage.store(place, key, value, layer)]
            stores[layer][0].reserve(10, 10)
    generator = torch.Generator().manual_seed(1)
    for (store,) in stores.values():
        for part in ("key", "value"):
            raw = store.contents(part).flatten(1).view(torch.uint8)
            raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8, generator=generator))
    return stores


def raw(store, part):
    return store.contents(part).flatten(1).view(torch.uint8).clone()


@pytest.mark.parametrize("kv_format", sorted(FORMATS))
@pytest.mark.parametrize("block_size", [1, 4])
def test_what_is_put_is_what_was_taken(kv_format, block_size):
    stores = make_stores(kv_format, block_size)
    before = {(layer, part): raw(stores[layer][0], part) for layer in stores for part in ("key", "value")}
    moved = BlockRows(GROUPS, stores)
    rows = moved.make(5)
    for group in (0, 1):
        moved.take(group, [7, 1, 3], rows, [4, 0, 2])
        moved.settle()
        for layer in GROUPS[group].layers:
            stores[layer][0].clear([7, 1, 3])
        moved.put(group, rows, [4, 0, 2], [7, 1, 3])
        for layer in GROUPS[group].layers:
            for part in ("key", "value"):
                assert torch.equal(raw(stores[layer][0], part), before[layer, part]), (layer, part)


def test_blocks_of_one_group_may_be_put_where_others_were():
    stores = make_stores()
    moved = BlockRows(GROUPS, stores)
    rows = moved.make(2)
    held = raw(stores[2][0], "value")[5]
    moved.take(0, [5], rows, [1])
    moved.put(0, rows, [1], [9])
    assert torch.equal(raw(stores[2][0], "value")[9], held)


def test_parts_of_a_row_are_read_as_what_they_are():
    stores = make_stores()
    moved = BlockRows(GROUPS, stores)
    rows = moved.make(3)
    moved.take(0, [2, 6], rows, [0, 1])
    for part in moved.parts(0):
        assert torch.equal(part.of(rows)[:2], stores[part.layer][0].contents(part.name)[[2, 6]])
        assert part.start % 16 == 0
    assert [(part.layer, part.name) for part in moved.parts(1)] == [(1, "key"), (1, "value")]


def test_rows_of_another_pool_or_of_a_pool_with_a_new_store_do_not_fit():
    stores = make_stores()
    moved = BlockRows(GROUPS, stores)
    assert moved.fits(GROUPS, stores)
    assert not moved.fits(GROUPS, make_stores())
    assert not moved.fits(GROUPS, stores | {1: [*stores[1], *make_stores()[1]]})
