"""One change of a pool after the other: whose turn it is, and what must happen before and after each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hfpaged.block_manager import BlockManager


class PoolChange:
    """After a change `finish` is called, also of one that failed, and then `settle`, if it did not."""

    def __init__(self, manager: BlockManager, settle: Callable[[], None] | None) -> None:
        self.lock = threading.Lock()
        self.finish: Callable[[], None] = lambda: None
        self._settle = settle or (lambda: None)
        self._manager = manager
        self._abandoned: deque[Callable[[BlockManager], None]] = deque()

    @contextmanager
    def __call__(self) -> Iterator[BlockManager]:
        """The block manager, for one thread at a time."""
        with self.lock:
            self._reclaim()
            try:
                yield self._manager
            finally:
                self.finish()
            self._settle()

    def abandon(self, free: Callable[[BlockManager], None]) -> None:
        """See `KVPool.abandon`."""
        self._abandoned.append(free)
        self.try_reclaim()

    def try_reclaim(self) -> None:
        """Free what was abandoned, unless a change is under way."""
        if self.lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self.lock.release()

    def _reclaim(self) -> None:
        while self._abandoned:
            self._abandoned.popleft()(self._manager)
