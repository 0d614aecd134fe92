"""Counts that outlive who kept them: the counters of a process never go back."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from hfpaged.clock import now


class Counts(Protocol):
    """What an owner has counted since it was made, for the model of that name."""

    model_name: str

    def add(self, other: Any) -> None:
        """Count what `other` has counted, too."""

    def owner_is_gone(self, time: float) -> None:
        """There was nobody left to count at `time`."""


C = TypeVar("C", bound=Counts)


class Outliving(Generic[C]):
    """The counts of owners that come and go, in sum by model.

    Owners may be collected in any thread, in the middle of anything: all that happens there is an append to a deque.
    Counts are kept from before that until they are merged, so that none is ever missing in the sums.
    """

    def __init__(self, new: Callable[[], C]) -> None:
        self._new = new
        self._lock = threading.Lock()
        self._kept: dict[int, C] = {}
        self._gone: dict[str, C] = {}
        self._left: deque[tuple[int, float]] = deque()

    def keep(self, owner: object, counts: C) -> None:
        """`owner` counts in `counts`, and in nothing else."""
        with self._lock:
            self._merge_gone()
            self._kept[id(counts)] = counts
            finalizer = weakref.finalize(owner, _note, self._left, id(counts))
            finalizer.atexit = False

    def sums(self) -> dict[str, C]:
        """By the name of the model, of those who are gone too."""
        sums: dict[str, C] = {}
        with self._lock:
            self._merge_gone()
            for counts in [*self._gone.values(), *self._kept.values()]:
                self._add(sums, counts)
        return sums

    def _merge_gone(self) -> None:
        while self._left:
            key, time = self._left.popleft()
            counts = self._kept.pop(key)
            counts.owner_is_gone(time)
            self._add(self._gone, counts)

    def _add(self, sums: dict[str, C], counts: C) -> None:
        if counts.model_name not in sums:
            sums[counts.model_name] = self._new()
            sums[counts.model_name].model_name = counts.model_name
        sums[counts.model_name].add(counts)


def _note(left: deque[tuple[int, float]], key: int) -> None:
    left.append((key, now()))
