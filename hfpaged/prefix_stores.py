"""The stores of layers for blocks that come from elsewhere, perhaps before the first key of the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfpaged.errors import PrefixFileError
from hfpaged.fingerprint import single_device
from hfpaged.kv_storage import LayerStore
from hfpaged.prefix_manifest import PARTS, LayerKind
from hfpaged.spread import layer_device

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool


def stores_for(
    pool: KVPool, layers: Mapping[int, LayerKind], model: Any, source: str
) -> dict[int, LayerStore]:  # fmt: skip
    """The store of each layer, made where its first key has not come yet, on the device where that layer of `model`
    makes its keys; where that cannot be told, wherever the layer has one already. `source`: from where the blocks come.

    Raises PrefixFileError where it is not known on which device a layer's will be, InvalidConfigError where the pool's
    memory holds no block.
    """
    where, single = {}, single_device(model)
    for layer in layers:
        device = single or layer_device(model, layer)
        known = [store.key.device for store in pool.layer_stores.get(layer, ())] if device is None else [device]
        if not known:
            raise PrefixFileError(
                f"{source} has keys for layer {layer}, and the device of that layer is not known yet in a model that "
                "is spread over several; generate one token on this pool first"
            )
        where[layer] = known[-1]
    stores = {}
    for group in pool.groups:
        for place, layer in enumerate(group.layers):
            if layer in layers:
                key, value = (_like(layers[layer], part, where[layer]) for part in PARTS)
                stores[layer] = pool.storage.store(place, key, value, layer)
                pool.settle_size(layer, stores[layer])
    return stores


def _like(kind: LayerKind, part: str, device: torch.device) -> Tensor:
    """A key or value [1, num_kv_heads, 0, dim]: what a store is made for."""
    return torch.empty(1, kind.heads, 0, kind.dim(part), dtype=kind.dtype(part), device=device)
