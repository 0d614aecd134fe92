"""Several pools and models in one process, and one pool of several models."""

from __future__ import annotations

import copy
import gc

import pytest
import tiny_models
import torch
from metrics_figures import Figures
from stub_batcher import StubBatcher

from hfpaged import ContinuousBatcher, KVPool, PagedCache
from hfpaged.kv_format import resolve_format
from hfpaged.layer_groups import LayerGroup
from hfpaged.telemetry import families, families_of
from hfpaged.telemetry.pool_readings import read_pools
from hfpaged.telemetry.readings import Readings

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"max_new_tokens": 3, "do_sample": False}


def pool_of(num_blocks, tokens, reserved=0):
    pool = KVPool((LayerGroup(None, (0,)),), block_size=4, kv_format=resolve_format("auto"), num_blocks=num_blocks)
    pool.manager.grow([(pool.manager.create([None]), tokens)])
    pool.blocks.reserved = lambda: reserved
    return pool


def usage(*pools):
    readings = Readings()
    read_pools(readings, pools, "model")
    return readings.of("model").numbers["hfpaged_kv_usage_ratio",]


def test_an_empty_pool_does_not_hide_a_full_one():
    assert usage(pool_of(10, 40), pool_of(990, 4)) == 1.0
    assert usage(pool_of(990, 4), pool_of(10, 40)) == 1.0


def test_memory_that_residuals_take_is_in_use():
    assert usage(pool_of(10, 24, reserved=4)) == 1.0


def test_a_batcher_on_the_pool_of_another_model_is_told_and_judged_under_its_own_name():
    first = StubBatcher(num_blocks=40, block_size=4)
    other = copy.deepcopy(tiny_models.shared("llama"))
    other.config._name_or_path = "some/other"
    second = ContinuousBatcher(other, pool=first.pool, prepack=False)
    second.generate([[5, 6, 7]], **GREEDY)
    figures = Figures(families_of(second))
    assert {dict(labels)["model_name"] for _, labels in figures.samples} == {"some/other"}
    assert sum(figures.by("hfpaged_kv_blocks", "state").values()) == 40
    assert second.diagnose().model_name == "some/other"


def test_caches_that_come_and_go_make_no_more_series():
    model = tiny_models.shared("llama")
    ids = torch.tensor([[5, 6, 7, 8, 9]])

    def sizes():
        found = (dict(labels) for name, labels in Figures(families()).samples if name == "hfpaged_kv_pool_info")
        return {labels["num_blocks"] for labels in found}

    gc.collect()
    before = sizes()
    cache = PagedCache(model, block_size=4)
    model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.pool.num_blocks > 1000
    assert sizes() - before == {"by free memory"}
    named = PagedCache(model, block_size=4, memory="100KiB")
    model.generate(ids, past_key_values=named, **GREEDY)
    assert str(named.pool.num_blocks) in sizes()
