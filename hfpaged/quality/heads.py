"""Which KV heads are stored worst: their keys and values are read back from the blocks and compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.quality.forward import forward
from hfpaged.quality.sides import NATIVE, Side


class HeadEffect(NamedTuple):
    """Of one KV head: the error of stored keys and values relative to their size (Frobenius norms), and the largest
    key channel against the root mean square of all: outliers are what formats with few bits fail at.
    """

    layer: int
    head: int
    key_error: float
    value_error: float
    key_amax: float
    key_outlier: float


def rank_heads(model: PreTrainedModel, texts: Tensor, side: Side) -> list[HeadEffect]:
    """By the error of their keys, the worst first. `texts` [rows, length] come in one forward, which computes the same
    keys and values in all formats, so that storing them is the only difference.
    """
    caches = [NATIVE.make_cache(model), side.make_cache(model)]
    try:
        for cache in caches:
            forward(model, texts, cache)
        native, stored = (cache.layers for cache in caches)
        effects = [effect for pair in enumerate(zip(native, stored, strict=True)) for effect in _of_layer(*pair)]
    finally:
        for cache in caches:
            cache.free()
    return sorted(effects, key=lambda effect: -max(effect.key_error, effect.value_error))


def _of_layer(layer: int, both: tuple[object, object]) -> Iterator[HeadEffect]:
    native, stored = both
    if getattr(native, "keys", None) is None:  # a layer that keeps a state
        return
    errors = [relative_error(getattr(native, part), getattr(stored, part)) for part in ("keys", "values")]
    keys = _by_head(native.keys)  # type: ignore[attr-defined]
    amax = keys.abs().amax(dim=1)
    outlier = amax / keys.square().mean(dim=1).sqrt().clamp_min(torch.finfo(keys.dtype).tiny)
    columns = (*errors, amax, outlier)
    for head, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        yield HeadEffect(layer, head, *numbers)


def relative_error(exact: Tensor, stored: Tensor) -> Tensor:
    """[num_kv_heads] of two tensors [batch, num_kv_heads, length, dim]."""
    exact, stored = _by_head(exact), _by_head(stored)
    size = exact.norm(dim=1).clamp_min(torch.finfo(exact.dtype).tiny)
    return (stored - exact).norm(dim=1) / size


def _by_head(tensor: Tensor) -> Tensor:
    """[num_kv_heads, all numbers of a head], in float32."""
    return tensor.float().transpose(0, 1).flatten(1)
