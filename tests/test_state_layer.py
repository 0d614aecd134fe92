"""Layers with a state beside their keys and values: the state goes where the keys go."""

from __future__ import annotations

import copy

import pytest
import torch
from family_models import build
from transformers import DynamicCache

import hfpaged
from hfpaged import compat
from hfpaged.state_layer import PagedHybridLayer, PagedIndexedLayer

CACHE = compat.cache_argument()
KINDS = {"falcon_h1": PagedHybridLayer, "inkling_text": PagedHybridLayer, "deepseek_v32": PagedIndexedLayer}


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(seed))


def logits(model, tokens, cache) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **{CACHE: cache}).logits[:, -1]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.fixture(params=KINDS)
def model(request):
    return build(request.param)


def test_keys_lie_in_blocks_and_the_rest_in_transformers_own_layer(model):
    cache = hfpaged.PagedCache(config=model.config)
    logits(model, ids(9), cache)
    name = model.config.model_type
    layers = [layer for layer in cache.layers if isinstance(layer, KINDS[name])]
    assert layers
    assert cache.pool.num_free < cache.pool.num_blocks
    assert all(not layer.own.is_initialized or layer.own.keys is None for layer in layers)


def test_a_copy_goes_on_alone(model):
    cache, theirs = hfpaged.PagedCache(config=model.config), DynamicCache(config=model.config)
    for one in (cache, theirs):
        logits(model, ids(9), one)
    fork, their_fork = copy.deepcopy(cache), copy.deepcopy(theirs)
    same(logits(model, ids(1, 1), fork), logits(model, ids(1, 1), their_fork))
    same(logits(model, ids(1, 2), cache), logits(model, ids(1, 2), theirs))
    same(logits(model, ids(1, 3), fork), logits(model, ids(1, 3), their_fork))
    cache.pool.check_integrity()


def test_rows_change_places_with_their_state(model):
    cache, theirs = hfpaged.PagedCache(config=model.config), DynamicCache(config=model.config)
    for one in (cache, theirs):
        logits(model, ids(9), one)
        one.reorder_cache(torch.tensor([1, 1]))
    same(logits(model, ids(1, 1), cache), logits(model, ids(1, 1), theirs))


def test_a_cache_that_was_freed_starts_anew(model):
    cache = hfpaged.PagedCache(config=model.config)
    logits(model, ids(9), cache)
    cache.free()
    assert cache.pool.num_free == cache.pool.num_blocks
    same(logits(model, ids(7, 4), cache), logits(model, ids(7, 4), DynamicCache(config=model.config)))


def test_it_can_be_cropped_where_transformers_own_can():
    model = build("deepseek_v32")
    cache, theirs = hfpaged.PagedCache(config=model.config), DynamicCache(config=model.config)
    for one in (cache, theirs):
        assert one.is_croppable
        logits(model, ids(9), one)
        one.crop(-4)
    same(logits(model, ids(1, 1), cache), logits(model, ids(1, 1), theirs))
    hybrid = build("falcon_h1")
    assert hfpaged.PagedCache(config=hybrid.config).is_croppable == DynamicCache(config=hybrid.config).is_croppable
