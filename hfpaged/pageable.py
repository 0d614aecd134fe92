"""Whether a model has keys and values that can be paged, and why not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hfpaged import compat, model_classes

USE_OWN = "use the cache that the model makes itself"
# Of the models with a cache of a class of their own, those in whose caches there are keys and values: the others
# keep recurrent states (RWKV, xLSTM) or hidden states (XLNet, Reformer).
_KEEPS_KEYS = ("minimax",)


@dataclass(frozen=True)
class Refusal:
    """`has_kv_cache`: whether there is something that could be paged, and we cannot. `for_its_layers`: whether it is
    the layers of transformers' cache for the model that cannot be paged.
    """

    reason: str
    has_kv_cache: bool
    for_its_layers: bool = False


def windows_of(config: PreTrainedConfig, layers: list[Any]) -> dict[int, int | None]:
    """The window, or None, of each of transformers' layers that can be paged, by index."""
    cross = cross_attention_layers(config)
    windows = {i: window for i, layer in enumerate(layers) for ok, window in [compat.pageable_window(layer)] if ok}
    return {i: window for i, window in windows.items() if i not in cross}


def cross_attention_layers(config: PreTrainedConfig) -> set[int]:
    """Layers that attend to pictures have other lengths than the text: their cache stays transformers' own."""
    return set(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ())


def why_refused(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None) -> Refusal | None:
    """None for a model that can be paged. `model_class` is looked up by the config where it is not given."""
    model_class = model_class or model_classes.model_class_of(config)
    if model_class is not None and not model_classes.makes_dynamic_cache(model_class):
        reason = f"{model_class.__name__} works with a cache of a class of its own only; {USE_OWN}"
        return Refusal(reason, config.model_type in _KEEPS_KEYS)
    if model_class is not None and not model_classes.takes_cache(model_class):
        return Refusal(f"{model_class.__name__} computes every token anew and takes no cache", False)
    try:
        layers = compat.default_layers(config)
    except AttributeError as error:
        return Refusal(f"transformers itself cannot make a cache for {type(config).__name__}: {error}", False)
    return None if windows_of(config, layers) else _nothing_to_page(config, layers)


def _nothing_to_page(config: PreTrainedConfig, layers: list[Any]) -> Refusal:
    kinds = Counter(type(layer).__name__ for layer in layers)
    counted = ", ".join(f"{count} {name}" for name, count in kinds.items())
    return Refusal(
        f"{type(config).__name__}: none of the {len(layers)} layers keeps plain keys and values ({counted}), so there "
        f"is nothing to page; {USE_OWN}",
        any(compat.holds_keys(layer) for layer in layers),
        for_its_layers=True,
    )
