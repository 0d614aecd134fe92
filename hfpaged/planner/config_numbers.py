"""Numbers of a config under any of the names that families give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def number(config: Config, *names: str, default: int = 0) -> int:
    """The first of `names` that is there as a number; of a list, one for each layer, the largest."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            value = max(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value)
    return default


def flag(config: Config, *names: str, default: bool = False) -> bool:
    """The first of `names` that is there as true or false."""
    return next((value for name in names if isinstance(value := config.get(name), bool)), default)


def by_layer(config: Config, name: str, layer: int, default: Any = None) -> Any:
    """The entry of `layer` in a list with one for each layer; `default` where there is none."""
    value = config.get(name)
    return value[layer] if isinstance(value, list) and layer < len(value) else default
