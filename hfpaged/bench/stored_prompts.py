"""Keys and values of a prompt, computed once and given to every cache: none has to compute them again, and all begin
with the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from hfpaged.bench.generation import first_tokens
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.setting import Setting
from hfpaged.bench.sides import PLAIN


class LayerStates(NamedTuple):
    """Of one layer, each [batch, num_kv_heads, length, dim]."""

    key: Tensor
    value: Tensor


@lru_cache(maxsize=1)
def prompt_states(setting: Setting, batch: int, length: int) -> tuple[LayerStates, ...]:
    """What plain transformers computes for random prompts. Rows of one size come one after the other in the table, so
    that the last ones are enough to keep.
    """
    PLAIN.switch(setting.model)
    cache = PLAIN.make_cache(setting.model)
    first_tokens(setting.model, random_ids(setting, batch, length), cache)
    return tuple(LayerStates(layer.keys, layer.values) for layer in cache.layers)


def fill(cache: Any, states: Sequence[LayerStates], start: int = 0, stop: int | None = None) -> None:
    """Store tokens `start` to `stop` of each layer, as a forward of the model would."""
    for layer, (key, value) in enumerate(states):
        cache.update(key[:, :, start:stop], value[:, :, start:stop], layer)
