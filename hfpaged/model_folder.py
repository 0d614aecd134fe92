"""Whether a name can be that of a model: a folder with what belongs in it, or an id of the hub."""

from __future__ import annotations

import os
from pathlib import Path

from hfpaged.demo_wheel import DemoModelError

REMEDY = "pass a folder written by save_pretrained() or the id of a causal language model on the Hugging Face hub"
_GGUF = "GGUF is not read here; pass the folder of the checkpoint in safetensors that it was made of"


def check_folder(name: str | Path) -> None:
    """What transformers says where nothing is there is about tokenizers, or about the hub. Raises DemoModelError."""
    if Path(name).is_file():
        raise DemoModelError(f"cannot load {str(name)!r}: this is a file; {_GGUF if _is_gguf(name) else REMEDY}")
    if _means_a_folder(name) and not Path(name).is_dir():
        raise DemoModelError(f"cannot load {str(name)!r}: there is no such folder; {REMEDY}")
    configs = (Path(name) / file for file in ("config.json", "adapter_config.json"))
    if Path(name).is_dir() and not any(file.is_file() for file in configs):
        remedy = _GGUF if any(map(_is_gguf, Path(name).iterdir())) else REMEDY
        raise DemoModelError(f"cannot load {str(name)!r}: this folder has no config.json; {remedy}")


def _is_gguf(name: str | Path) -> bool:
    return Path(name).suffix == ".gguf"


def _means_a_folder(name: str | Path) -> bool:
    """Hub ids are relative and never start like these, which would only confuse the hub client."""
    return isinstance(name, Path) or name.startswith((".", "~", os.sep)) or Path(name).is_absolute()
