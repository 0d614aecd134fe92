"""All batchers of this process, for those who watch them all, and what they have counted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from hfpaged.engine.events import Hook
from hfpaged.engine.tally import Tally
from hfpaged.outliving import Outliving

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher

HookMaker = Callable[["ContinuousBatcher"], Hook]

_lock = threading.RLock()  # makers are called under it: each batcher has one hook of each, whoever comes first
_batchers: weakref.WeakSet[ContinuousBatcher] = weakref.WeakSet()
_makers: dict[HookMaker, weakref.WeakKeyDictionary[ContinuousBatcher, Hook]] = {}
_tallies: Outliving[Tally] = Outliving(Tally)


def live_batchers() -> list[ContinuousBatcher]:
    """Those that are there, in no order."""
    with _lock:
        return list(_batchers)


def tallies() -> dict[str, Tally]:
    """What all batchers have counted, those that are gone too, by the name of the model."""
    return _tallies.sums()


def register(batcher: ContinuousBatcher) -> None:
    """A new one."""
    _tallies.keep(batcher, batcher.tally)
    with _lock:
        _batchers.add(batcher)
        for maker in _makers:
            _attach(maker, batcher)


def watch(maker: HookMaker) -> None:
    """Give each batcher, those to come too, a hook that `maker` makes for it."""
    with _lock:
        if maker not in _makers:
            _makers[maker] = weakref.WeakKeyDictionary()
            for batcher in list(_batchers):
                _attach(maker, batcher)


def unwatch(maker: HookMaker) -> None:
    """Undo `watch`."""
    with _lock:
        for batcher, hook in _makers.pop(maker, {}).items():
            if hook in batcher.hooks:
                batcher.hooks.remove(hook)


def _attach(maker: HookMaker, batcher: ContinuousBatcher) -> None:
    hook = maker(batcher)
    _makers[maker][batcher] = hook
    batcher.hooks.append(hook)
