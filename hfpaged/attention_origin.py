"""Which attention implementation a patched config had before, found again by the config."""

from __future__ import annotations

import weakref
from typing import Any

from hfpaged import compat

# By identity: configs are not hashable. The weak reference tells a dead config from a new one at its address.
_origins: dict[int, tuple[weakref.ref[Any], str]] = {}


def origin(config: Any) -> str:
    """The implementation that `config` had before it was patched; of an unpatched one, the one that it has.

    A copy of a patched model was never patched itself: it gets sdpa, which every model that can be patched has
    or replaces by its own eager function.
    """
    entry = _origins.get(id(config))
    if entry is not None and entry[0]() is config:
        return entry[1]
    name = compat.attention_of(config)
    return "sdpa" if name == compat.ATTENTION_NAME else name


def remember(config: Any) -> None:
    """Note the implementation that `config` has now."""
    address = id(config)
    _origins[address] = (
        weakref.ref(config, lambda _: _origins.pop(address, None)),
        compat.attention_of(config),
    )


def forget(config: Any) -> str:
    """The noted implementation, no longer noted."""
    name = origin(config)
    _origins.pop(id(config), None)
    return name
