"""PEFT adapters of a server: folders by the name under which requests choose them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hfpaged.adapter_choice import BASE, AdapterChoices
from hfpaged.compat import transformers_model
from hfpaged.errors import InvalidConfigError
from hfpaged.spread import input_device

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def load_adapters(model: nn.Module, adapters: Mapping[str, str]) -> nn.Module:
    """The model with these adapters in PEFT's wrapper, none of them active: a request that chooses none gets the model
    itself. Paths are folders, or ids on a hub; only safetensors are read, as a pickle can run any code.

    Raises InvalidConfigError for an adapter that is not there, is a pickle, or does not fit the model.
    """
    if not adapters:
        return model
    if importlib.util.find_spec("peft") is None:
        raise InvalidConfigError("--adapter needs PEFT; pip install 'hfpaged[adapters]'")
    folders = {name: _folder(name, path) for name, path in adapters.items()}
    for name, folder in folders.items():
        model = _load(model, name, folder)
    model.eval().requires_grad_(False)
    choices = AdapterChoices(model)
    for name in adapters:
        choices.check(name)
    wrapped: Any = model
    wrapped.base_model.disable_adapter_layers()
    return model


def _folder(name: str, path: str) -> Path:
    """Where the files of an adapter lie."""
    _check_name(name)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = _downloaded(name, path)
    if not (folder / CONFIG).is_file():
        raise InvalidConfigError(f"--adapter {name}={path}: {folder} has no {CONFIG}; give the folder that PEFT saved")
    if not (folder / WEIGHTS).is_file():
        raise InvalidConfigError(
            f"--adapter {name}={path}: {folder} has no {WEIGHTS}, and a .bin is a pickle, which can run any code when "
            "it is read; load it where you trust it and save it again with PEFT's save_pretrained()"
        )
    return folder


def _check_name(name: str) -> None:
    try:
        nn.ModuleDict({name: nn.Identity()})
    except KeyError as error:
        raise InvalidConfigError(
            f"--adapter {name}=: PEFT keeps adapters as modules of torch by their names ({error.args[0]}); use another "
            "name, without dots"
        ) from error
    if name == BASE:
        raise InvalidConfigError(f"--adapter {BASE}=: this name stands for the model without adapters; use another one")


def _downloaded(name: str, path: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:  # of the hub's client, or for a text that is no id
        raise InvalidConfigError(
            f"--adapter {name}={path}: there is no such folder, and no hub gives it "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}); give the folder that PEFT saved"
        ) from error


def _load(model: nn.Module, name: str, folder: Path) -> nn.Module:
    from peft import PeftModel

    wrapped: Any = model
    settings: dict[str, Any] = {"adapter_name": name, "torch_device": str(input_device(transformers_model(model)))}
    try:
        if not isinstance(model, PeftModel):
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*missing adapter keys.*")  # see below
                return PeftModel.from_pretrained(wrapped, str(folder), **settings)
        found = model.load_adapter(str(folder), **settings)
        # PEFT goes on with zeros for what a file does not have: the adapter of another model would do nothing.
        if missing := [key for key in found.missing_keys if f".{name}" in key]:
            raise ValueError(f"missing adapter keys: {missing}")
        return model
    except Exception as error:
        raise InvalidConfigError(
            f"--adapter {name}={folder}: PEFT cannot put it on {type(transformers_model(model)).__name__} "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0][:300]}); use an adapter that was made for "
            "this model, all of one kind"
        ) from error
