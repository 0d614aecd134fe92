"""The caches that are compared: the native one and those of the formats."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hfpaged.cache import PagedCache
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import resolve_format
from hfpaged.kv_scales import KVScales
from hfpaged.quality.forward import forward
from hfpaged.spread import input_device


class Footprint(NamedTuple):
    """What a format takes: bytes of one token in all layers, scales included, and what it keeps besides for each
    sequence, its unfilled block as the model computes it.
    """

    per_token: float
    per_sequence: int


@dataclass(frozen=True)
class Side:
    """A KV format under the name that it has in tables; `kv_scales` are static ones for fp8."""

    name: str
    kv_dtype: Any
    kv_scales: KVScales | None = None

    def make_cache(self, model: PreTrainedModel) -> PagedCache:
        """An empty cache with a pool of its own. Nothing is shared: what is read was written by this very cache."""
        return PagedCache(model, kv_dtype=self.kv_dtype, kv_scales=self.kv_scales, prefix_sharing=False)

    def footprint(self, model: PreTrainedModel) -> Footprint:
        """As the pool counts it."""
        cache = self.make_cache(model)
        try:
            forward(model, torch.zeros(1, 2, dtype=torch.int64, device=input_device(model)), cache)
            pool = cache.pool
            # A token has a slot in a block of each layer group, and the groups use the same stores.
            groups, storage = len(pool.groups), pool.storage
            return Footprint(groups * storage.block_bytes / pool.block_size, groups * storage.residual_bytes)
        finally:
            cache.free()


NATIVE = Side("auto", "auto")


def parse_sides(kv: str, against: str | None, scales: KVScales | None = None) -> list[Side]:
    """The formats to judge, each once; `kv` is a name, or a JSON object as `kv_dtype` takes it, `against` are names.
    Static `scales` are for `kv` alone. Raises InvalidConfigError for names that there are not.
    """
    first = _described(kv) if kv.lstrip().startswith("{") else _named(kv)
    if scales is not None:
        first = replace(first, name=f"{first.name} static", kv_scales=scales)
    others = [_named(name) for name in against.split(",")] if against else []
    return list({side.name: side for side in (first, *others)}.values())


def _named(name: str) -> Side:
    kv_format = resolve_format(name.strip())
    return Side(kv_format.name, kv_format.name)


def _described(text: str) -> Side:
    """{"default": "int8", "layers": {"0": "auto"}}: the numbers of layers are texts in JSON."""
    try:
        parts = json.loads(text)
    except ValueError as error:
        raise InvalidConfigError(
            f'--kv {text}: this is no JSON such as {{"default": "int8", "layers": {{"0": "auto"}}}}: {error}'
        ) from error
    return Side(resolve_format(parts).title, parts)
