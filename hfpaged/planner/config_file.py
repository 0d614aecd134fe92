"""Finding and reading the config.json of a model: of a folder, a file, or a name on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpaged.errors import InvalidConfigError


@dataclass(frozen=True)
class ConfigFile:
    """`values` of the config.json at `path`, of what the user called `name`."""

    name: str
    path: Path
    values: dict[str, Any]


def read_config(name: str) -> ConfigFile:
    """Read the config of a folder, a file or a hub id. Raises InvalidConfigError."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InvalidConfigError(f"{name} is neither a folder with a config.json nor such a file")
    return ConfigFile(name, path, _object(path))


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"{path} cannot be read as JSON: {error}; give the config.json of a model") from error
    if not isinstance(values, dict):
        raise InvalidConfigError(f"{path} holds no JSON object; give the config.json of a model")
    return values
