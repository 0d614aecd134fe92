"""Keys and values of a prompt, computed once and given to every cache: none has to compute them again, and all begin
with the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hfpaged import compat
from hfpaged.bench.generation import first_tokens
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.setting import Setting
from hfpaged.bench.sides import PLAIN


class LayerStates(NamedTuple):
    """Of one layer, each [batch, num_kv_heads, length, dim]."""

    key: Tensor
    value: Tensor


States = Mapping[int, LayerStates]  # by layer


class Recorder(DynamicCache):
    """transformers' own cache, that also keeps what was given to it, where a window would forget it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.given: dict[int, LayerStates] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.given[layer_idx] = LayerStates(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@lru_cache(maxsize=1)
def prompt_states(setting: Setting, batch: int, length: int) -> States:
    """What plain transformers computes for random prompts. Rows of one size come one after the other in the table, so
    that the last ones are enough to keep.
    """
    PLAIN.switch(setting.model)
    cache = Recorder(setting.model.config)
    first_tokens(setting.model, random_ids(setting, batch, length), cache)
    return cache.given


def fill(cache: Any, states: States, start: int = 0, stop: int | None = None) -> None:
    """Store tokens `start` to `stop` of each layer, as a forward of the model would."""
    for layer, (key, value) in states.items():
        cache.update(key[:, :, start:stop], value[:, :, start:stop], layer)


def keeps_more(setting: Setting) -> bool:
    """Whether the model keeps more of a prompt than keys and values, which `fill` does not know."""
    layers = compat.default_layers(setting.model.config)
    return any(
        isinstance(layer, LinearAttentionCacheLayerMixin) or hasattr(layer, "update_indexer") for layer in layers
    )
