from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig

from hfpaged.measure import KVBytes, alternate, dynamic_kv_bytes


def test_runs_take_turns_and_the_warm_up_is_not_counted():
    calls = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2, warmup=1)
    assert calls == ["a", "b", "a", "b", "b", "a"]  # the second turn begins with the other one
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    assert min(map(min, seconds.values())) >= 0


def filled(length, **config):
    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=3, **config))
    for layer in range(2):
        cache.update(torch.zeros(2, 4, length, 8), torch.zeros(2, 4, length, 8), layer)
    return cache


def test_left_padding_is_reserved_but_not_live():
    token = 2 * 2 * 4 * 8 * 4  # layers, keys and values, heads, head_dim, bytes of float32
    assert dynamic_kv_bytes(filled(10), padding=[0, 3]) == KVBytes(live=17 * token, reserved=20 * token)


def test_a_cache_that_holds_nothing_yet_has_no_bytes():
    assert dynamic_kv_bytes(DynamicCache(), padding=[0]) == KVBytes(0, 0)
