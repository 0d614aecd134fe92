"""The caches that are compared: the native one and those of the formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hfpaged.cache import PagedCache
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import resolve_format
from hfpaged.quality.forward import forward


@dataclass(frozen=True)
class Side:
    """A KV format under the name that it has in tables."""

    name: str
    kv_dtype: Any

    def make_cache(self, model: PreTrainedModel) -> PagedCache:
        """An empty cache with a pool of its own. Nothing is shared: what is read was written by this very cache."""
        return PagedCache(model, kv_dtype=self.kv_dtype, prefix_sharing=False)

    def bytes_per_token(self, model: PreTrainedModel) -> float:
        """Of all layers, as the pool counts its blocks: scales included."""
        cache = self.make_cache(model)
        try:
            forward(model, torch.zeros(1, 2, dtype=torch.int64, device=model.device), cache)
            pool = cache.pool
            # A token has a slot in a block of each layer group, and the groups use the same stores.
            return len(pool.groups) * pool.storage.block_bytes / pool.block_size
        finally:
            cache.free()


NATIVE = Side("auto", "auto")


def parse_sides(kv: str, against: str | None) -> list[Side]:
    """The formats to judge, each once; `kv` is a name or a JSON object as `kv_dtype` takes it, `against` names.

    Raises InvalidConfigError for names that there are not.
    """
    sides = [_described(kv) if kv.lstrip().startswith("{") else _named(kv.strip())]
    sides += [_named(name.strip()) for name in against.split(",")] if against else []
    return list({side.name: side for side in sides}.values())


def _named(name: str) -> Side:
    return Side(resolve_format(name).name, name)


def _described(text: str) -> Side:
    """{"default": "int8", "layers": {"0": "auto"}}: the numbers of layers are texts in JSON."""
    try:
        parts = json.loads(text)
        layers = {int(layer): name for layer, name in parts.get("layers", {}).items()}
    except (ValueError, AttributeError) as error:
        raise InvalidConfigError(
            f'--kv {text}: this is no JSON object such as {{"default": "int8", "layers": {{"0": "auto"}}}}: {error}'
        ) from error
    exceptions = ", ".join(f"{layer}: {name}" for layer, name in layers.items())
    return Side(f"{parts.get('default', 'auto')} but {exceptions}", parts | {"layers": layers})
