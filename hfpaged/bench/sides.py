"""The two sides of every comparison: transformers as it is, and the same model with a PagedCache."""

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
