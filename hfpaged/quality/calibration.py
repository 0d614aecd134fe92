"""Static scales: the largest keys and values of each head, seen while the model reads the texts natively."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hfpaged.fingerprint import model_keys
from hfpaged.kv_scales import KVScales, LayerAmax
from hfpaged.quality.forward import forward


class Recorder(DynamicCache):
    """transformers' own cache, that notes the largest absolute number of each KV head, of all texts together."""

    def __init__(self, config: Any, seen: dict[int, LayerAmax]) -> None:
        super().__init__(config=config)
        self._seen = seen

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        now = LayerAmax(_by_head(key_states), _by_head(value_states))
        known = self._seen.get(layer_idx, now)
        self._seen[layer_idx] = LayerAmax(torch.maximum(known.key, now.key), torch.maximum(known.value, now.value))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _by_head(states: Tensor) -> Tensor:
    """[num_kv_heads] of [batch, num_kv_heads, length, dim]."""
    return states.detach().float().abs().amax(dim=(0, 2, 3)).cpu()


def calibrate(model: PreTrainedModel, batches: Iterable[Tensor], kv_format: str) -> KVScales:
    """Read all `batches` [rows, length] with the model. Nothing about it changes."""
    seen: dict[int, LayerAmax] = {}
    for batch in batches:
        forward(model, batch, Recorder(model.config, seen))
    return KVScales(kv_format, model_keys(model)[0].value, dict(sorted(seen.items())))
