"""Which attention implementation a patched config had before, found again by the config."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from hfpaged import compat


@dataclass
class _Entry:
    """`holders` counts the patched models of this config: several models may be made from one."""

    config: weakref.ref[Any]  # tells a dead config from a new one at its address
    name: str
    holders: int


_origins: dict[int, _Entry] = {}  # by identity: configs are not hashable


def origin(config: Any, *, beyond_sdpa: bool = False) -> str:
    """The implementation that `config` had before it was patched; of an unpatched one, the one that it has.

    A copy of a patched config has it in its name. Where nothing tells it is sdpa, or the model's eager function where
    attention has parts that sdpa leaves out (`beyond_sdpa`: a soft cap, sinks).
    """
    name = compat.attention_of(config)
    if name != compat.ATTENTION_NAME:
        return name
    entry = _find(config)
    if entry is not None:
        return entry.name
    return compat.origin_in_name(config) or ("eager" if beyond_sdpa else "sdpa")


def remember(config: Any) -> None:
    """Note the implementation that `config` has now, for one more model."""
    entry = _find(config)
    if entry is not None and compat.attention_of(config) == compat.ATTENTION_NAME:
        entry.holders += 1
        return
    address = id(config)
    ref = weakref.ref(config, lambda _: _origins.pop(address, None))
    _origins[address] = _Entry(ref, origin(config), 1)


def forget(config: Any) -> str | None:
    """What `config` is to have again; None while another patched model has this config."""
    entry = _find(config)
    if entry is None:
        return origin(config)
    entry.holders -= 1
    if entry.holders:
        return None
    name = origin(config)  # not the noted one, if somebody chose another meanwhile
    del _origins[id(config)]
    return name


def _find(config: Any) -> _Entry | None:
    entry = _origins.get(id(config))
    return entry if entry is not None and entry.config() is config else None
