"""Which layers suffer most: each is quantized alone, and all the others stay native."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.kv_format import resolve_format
from hfpaged.quality.contexts import Context
from hfpaged.quality.lockstep import compare
from hfpaged.quality.metrics import summarize
from hfpaged.quality.sides import NATIVE, Side

SHOWN = 5


class LayerEffect(NamedTuple):
    """What quantizing this layer alone does."""

    layer: int
    kl_mean: float
    top1: float


def alone(side: Side, layer: int) -> Side:
    """The format of `side` in this layer, all others native."""
    own = dict(resolve_format(side.kv_dtype).exempt).get(layer, _default(side))
    return replace(side, name=f"layer {layer}", kv_dtype={"default": "auto", "layers": {layer: own}})


def paged_layers(model: PreTrainedModel) -> list[int]:
    """The numbers of the layers whose keys and values lie in blocks."""
    return sorted(layer for group in NATIVE.make_cache(model).pool.groups for layer in group.layers)


def rank_layers(
    model: PreTrainedModel, batches: Iterable[Tensor], context: Context, sides: Mapping[int, Side],
    tick: Callable[[], None],
) -> list[LayerEffect]:  # fmt: skip
    """By mean KL divergence, the worst first. `sides` has one for each layer."""
    results = compare(model, batches, context, list(sides.values()), tick)
    effects = []
    for layer, scores in zip(sides, results, strict=True):
        summary = summarize(scores)
        effects.append(LayerEffect(layer, summary.kl_mean, summary.top1))
    return sorted(effects, key=lambda effect: -effect.kl_mean)


def exempting(side: Side, effects: Sequence[LayerEffect]) -> dict[str, Any]:
    """What to give as `kv_dtype` so that these layers stay native."""
    layers = {layer: own.name for layer, own in resolve_format(side.kv_dtype).exempt}
    layers |= {effect.layer: "auto" for effect in effects}
    return {"default": _default(side), "layers": dict(sorted(layers.items()))}


def _default(side: Side) -> Any:
    """What layers have that are not named."""
    return side.kv_dtype.get("default", "auto") if isinstance(side.kv_dtype, Mapping) else side.kv_dtype
