"""The sides of comparisons: transformers as it is, and the same model with a PagedCache, quantized or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache, PreTrainedModel

import hfpaged
from hfpaged.measure import dynamic_kv_bytes


@dataclass(frozen=True)
class Side:
    """`switch` gives the model this side's attention, `make_cache` makes an empty cache, `kv_bytes` sizes one."""

    name: str
    switch: Callable[[PreTrainedModel], object]
    make_cache: Callable[[PreTrainedModel], Any]
    kv_bytes: Callable[[Any], int]


PLAIN = Side(
    "transformers",
    switch=hfpaged.unpatch,
    make_cache=lambda model: DynamicCache(config=model.config),
    kv_bytes=lambda cache: dynamic_kv_bytes(cache, padding=[0]).reserved,
)
PAGED = Side(
    "hfpaged",
    switch=hfpaged.patch,
    make_cache=lambda model: hfpaged.PagedCache(model),
    kv_bytes=lambda cache: int(cache.stats().bytes_reserved),
)
SIDES = (PLAIN, PAGED)


def in_format(kv_dtype: str, num_blocks: int | None = None) -> Side:
    """hfpaged with a KV format, and a pool that grows to at most `num_blocks`."""

    def make_cache(model: PreTrainedModel) -> Any:
        return hfpaged.PagedCache(model, kv_dtype=kv_dtype, num_blocks=num_blocks, prefix_sharing=False)

    return Side(kv_dtype, PAGED.switch, make_cache, PAGED.kv_bytes)
