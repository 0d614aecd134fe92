"""PEFT's adapters in a model: which of them take part in its forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hfpaged.compat import transformers_model


def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """The names of the adapters that take part in a forward of `model` now, sorted: of PEFT, wrapped around the model
    or loaded by transformers' own integration; merged ones too, disabled ones not; () without any.

    PEFT's prompt tuning is told only by the wrapped model: the model inside sees its embeddings as input.
    """
    names: set[str] = set()
    for layer in adapter_layers(transformers_model(model)):
        if not layer.disable_adapters:
            names.update(getattr(layer, "merged_adapters", ()) or layer.active_adapters)
    wrapper: Any = None if isinstance(model, PreTrainedModel) else model
    if getattr(wrapper, "active_peft_config", None) and wrapper.active_peft_config.is_prompt_learning:
        names.update(() if wrapper._adapters_disabled else wrapper.active_adapters)
    return tuple(sorted(names))


def adapter_scales(model: nn.Module) -> str | None:
    """How strongly the adapters act in each layer, and where they are merged, as text; None without any."""
    layers = adapter_layers(transformers_model(model))
    scales = [
        (getattr(layer, "merged_adapters", ()), sorted(getattr(layer, "scaling", {}).items())) for layer in layers
    ]
    return repr(scales) if scales else None


def row_adapters(model: nn.Module) -> tuple[str, ...] | None:
    """The adapter of each row of the forward under way, where its caller gave PEFT `adapter_names`; else None.

    "__base__" is a row without. PEFT takes the argument away and hangs it on its layers as hooks.
    """
    for layer in adapter_layers(transformers_model(model)):
        for hook in layer._forward_pre_hooks.values():
            names = getattr(hook, "keywords", {}).get("adapter_names")
            if names is not None:
                return tuple(names)
        return None  # each layer has the hook, or none
    return None


def adapter_layers(model: PreTrainedModel) -> Iterator[Any]:
    """PEFT's layers in `model`, and its copies of modules that were trained as a whole."""
    if getattr(model, "peft_config", None):  # PEFT leaves it on every model in which it replaces layers
        for module in model.modules():
            if isinstance(getattr(type(module), "disable_adapters", None), property):  # of a model it is a method
                yield module
