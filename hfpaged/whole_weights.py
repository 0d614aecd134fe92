"""Checkpoints that hold what their model computes with. transformers puts random numbers where one lacks something,
leaves out what has no place, says so in its log, and goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import find_adapter_config_file, is_peft_available

from hfpaged.errors import CheckpointError

_TOLD = 3  # tensors that are named
# What classes are called whose head gives no tokens.
_NO_TEXT = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def load_whole(name: str | os.PathLike[str], model_class: Any, **arguments: Any) -> Any:
    """`model_class.from_pretrained(name, **arguments)`, of a checkpoint that fits: each tensor of the model is in it,
    and none for its layers that the model would leave out. For an adapter that holds of the model below it.

    Raises CheckpointError.
    """
    base = _below(name, arguments)
    model = _load(model_class, name if base is None else base, arguments)
    if base is not None:
        model.load_adapter(os.fspath(name), adapter_kwargs=_for_files(arguments))
    return model


def for_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of from_pretrained()'s arguments that AutoConfig takes too."""
    return {name: arguments[name] for name in (*_HUB, "trust_remote_code") if name in arguments}


def _for_files(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _HUB if name in arguments}


def _load(model_class: Any, name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Any:
    # It raises for other shapes, and has told of them in its log alone.
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = model_class.from_pretrained(name, **{**arguments, **told})
    check(name, model, info)
    return model


def _below(name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> str | None:
    """The model that the adapter called `name` is for; None for what is no adapter alone. transformers would load both,
    and tell of the adapter only.
    """
    if not is_peft_available() or (Path(name) / "config.json").is_file():
        return None
    found = find_adapter_config_file(os.fspath(name), **_for_files(arguments))
    if found is None:
        return None
    base = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"cannot load {os.fspath(name)!r}: it is an adapter, and its adapter_config.json does not say of which "
            "model (base_model_name_or_path is empty); write its folder or id there, or put the adapter on a model: "
            "`hfpaged serve MODEL --adapter NAME=PATH`"
        )
    if os.path.isabs(base) and not os.path.isdir(base):
        raise CheckpointError(
            f"cannot load {os.fspath(name)!r}: it is an adapter of {base!r}, and there is no such folder; put that "
            "model there, or its adapter on the model where it is: `hfpaged serve MODEL --adapter NAME=PATH`"
        )
    return str(base)


def check(name: str | os.PathLike[str], model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """`info` is what from_pretrained() tells with output_loading_info=True. Raises CheckpointError."""
    modules = dict(model.named_modules())
    missing, other = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    left_out = [key for key in sorted(info["unexpected_keys"]) if _is_of_a_layer(key, modules)]
    class_name, saved = type(model).__name__, _saved_from(model)
    if missing:
        reason = (
            f"{len(missing)} of the {len(model.state_dict())} tensors of {class_name} are not in its files "
            f"({_some(missing)}), and transformers puts random numbers in their place; fetch the files again, all of "
            "them" + (f", or use a checkpoint of {class_name}: these were saved from {saved}" if saved else "")
        )
    elif other:
        some = _some([f"{key} is {[*there]}, not {[*wanted]}" for key, there, wanted in other])
        reason = (
            f"{len(other)} tensors have other shapes than config.json says ({some}), and transformers puts random "
            "numbers in their place; the files are of two models: fetch all of them again"
        )
    elif left_out and getattr(model.config, "quantization_config", None) is None:  # some tools write biases, all zero
        reason = (
            f"{len(left_out)} tensors in its files are for layers of {class_name} that have no place for them "
            f"({_some(left_out)}), so that other numbers would come out than what was trained; correct model_type and "
            "the switches in config.json"
        )
    elif saved.endswith(_NO_TEXT) and info["unexpected_keys"] and model.can_generate():
        reason = f"it was saved from {saved}, whose head gives no tokens; use a model that was trained to generate text"
    else:
        return
    raise CheckpointError(f"cannot load {os.fspath(name)!r}: {reason}")


def _saved_from(model: PreTrainedModel) -> str:
    """The name of another class; empty where it is the same, or not known."""
    names = getattr(model.config, "architectures", None) or [""]
    return "" if type(model).__name__ in names else str(names[0])


def _is_of_a_layer(key: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether `key` is a weight or bias in one of the numbered layers. Old checkpoints keep masks as buffers there."""
    *path, leaf = key.split(".")
    numbers = [place for place, part in enumerate(path) if part.isdecimal()]
    if leaf not in ("weight", "bias") or not numbers or ".".join(path[: numbers[0] + 1]) not in modules:
        return False
    parent = modules.get(".".join(path))
    return parent is None or leaf not in dict(parent.named_buffers(recurse=False))


def _some(names: list[str]) -> str:
    more = len(names) - _TOLD
    return ", ".join(names[:_TOLD]) + (f" and {more} more" if more > 0 else "")
