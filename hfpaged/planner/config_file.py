"""Finding and reading the config.json of a model: of a folder, a file, or a name on the hub."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.families import is_known

CONFIG = "config.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ConfigFile:
    """`values` of the config.json at `path`, of what the user called `name`."""

    name: str
    path: Path
    values: dict[str, Any]


def read_config(name: str) -> ConfigFile:
    """Read the config of a folder, a file or a hub id. Raises InvalidConfigError."""
    path = _find(name)
    return ConfigFile(name, path, _object(path))


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / CONFIG
        if not path.is_file():
            raise InvalidConfigError(f"the folder {name} has no {CONFIG}; give the folder that the weights lie in")
    if path.is_file():
        return path
    if path.suffix == ".json" or path.is_absolute() or name.startswith(".") or not _HUB_ID.fullmatch(name):
        raise InvalidConfigError(f"there is no file {name}; give a folder with a {CONFIG}, such a file, or a hub id")
    return _in_hub_cache(name) or _downloaded(name)


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it has downloaded, by the environment variables that it reads."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _in_hub_cache(name: str) -> Path | None:
    """The config of the main revision, else of the newest one that is here; None where there is none."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    revision = folder / "refs" / "main"
    if revision.is_file():
        path = folder / "snapshots" / revision.read_text(encoding="utf-8").strip() / CONFIG
        if path.is_file():
            return path
    found = list(folder.glob(f"snapshots/*/{CONFIG}"))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _downloaded(name: str) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise InvalidConfigError(_not_found(name, "HF_HUB_OFFLINE forbids to download it; unset it, or"))
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG))
    except Exception as error:  # of its own, of requests or of the system: what there is depends on the version
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InvalidConfigError(_not_found(name, f"the hub gave none ({why});")) from error


def _not_found(name: str, why: str) -> str:
    known = ""
    if is_known(name):
        known = f" {name!r} is a model type, of which there are models of many sizes."
    return (
        f"{name} is no folder or file here, and its {CONFIG} is not in {hub_cache()}.{known} {why[0].upper()}{why[1:]} "
        f"give a folder with a {CONFIG}, or such a file"
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"{path} cannot be read as JSON: {error}; give the {CONFIG} of a model") from error
    if not isinstance(values, dict):
        raise InvalidConfigError(f"{path} holds no JSON object; give the {CONFIG} of a model")
    return values
