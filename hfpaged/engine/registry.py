"""All batchers of this process, for those who watch them all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from hfpaged.engine.events import Hook

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher

HookMaker = Callable[["ContinuousBatcher"], Hook]

_batchers: weakref.WeakSet[ContinuousBatcher] = weakref.WeakSet()
_makers: dict[HookMaker, weakref.WeakKeyDictionary[ContinuousBatcher, Hook]] = {}


def live_batchers() -> list[ContinuousBatcher]:
    """Those that are there, in no order."""
    return list(_batchers)


def register(batcher: ContinuousBatcher) -> None:
    """A new one."""
    _batchers.add(batcher)
    for maker in list(_makers):
        _attach(maker, batcher)


def watch(maker: HookMaker) -> None:
    """Give each batcher, those to come too, a hook that `maker` makes for it."""
    if maker not in _makers:
        _makers[maker] = weakref.WeakKeyDictionary()
        for batcher in live_batchers():
            _attach(maker, batcher)


def unwatch(maker: HookMaker) -> None:
    """Undo `watch`."""
    for batcher, hook in _makers.pop(maker, {}).items():
        if hook in batcher.hooks:
            batcher.hooks.remove(hook)


def _attach(maker: HookMaker, batcher: ContinuousBatcher) -> None:
    hook = maker(batcher)
    _makers[maker][batcher] = hook
    batcher.hooks.append(hook)
