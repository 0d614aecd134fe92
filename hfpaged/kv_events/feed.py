"""What changes among the blocks of one place, handed from the threads that change it to the one that publishes.

A change waits as (block, whether it is there now). Where too many wait they are dropped, and what is there is told
anew: whoever follows is told first that all is gone. A snapshot may be read beside changes: each change that it has
seen already comes again behind it, and telling that a block is there, or not, does no harm when it is told twice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple, Protocol

from hfpaged.block_table import GONE
from hfpaged.prefix_block import BlockWatcher, PrefixBlock


class Place(Protocol):
    """Where blocks are: the index of what is published from a pool, or host memory below it."""

    watchers: list[BlockWatcher]

    def entries(self) -> list[PrefixBlock]:
        """Those that have a block here; may be called by any thread."""


Has = Callable[[PrefixBlock, int], bool]  # whether the block of a layer group of an entry is in that place


def is_in_pool(entry: PrefixBlock, group: int) -> bool:
    """Of the blocks of a pool."""
    return entry.blocks[group] != GONE


class Change(NamedTuple):
    entry: PrefixBlock
    is_there: bool


def in_order(entries: Iterable[PrefixBlock]) -> list[Change]:
    """That they are there, each behind its parent."""
    return [Change(entry, True) for entry in sorted(entries, key=attrgetter("number"))]


class BlockFeed:
    """A BlockWatcher of a place. A block of tokens is there while all layer groups of full attention have it, for
    without one of them nothing can begin with it; in models that have no such group, while any group has it.

    `has_news` is set when there is something to take.
    """

    def __init__(
        self, place: Place, has: Has, windows: Many[int | None], capacity: int, has_news: threading.Event
    ) -> None:
        self._place, self._has, self._capacity, self.has_news = place, has, capacity, has_news
        self._whole = [group for group, window in enumerate(windows) if window is None]
        self._groups = self._whole or range(len(windows))
        self._changes: deque[Change] = deque()
        self._is_behind = True  # all that is there is to be told
        self._num_dropped = self._num_dropped_before = 0

    def start(self) -> None:
        """Tell of all that is there, and of what changes from now on."""
        self._place.watchers = [*self._place.watchers, self]  # others may be going through the old list
        self.has_news.set()

    def stop(self) -> None:
        """Changes are no longer noticed; those that wait can still be taken."""
        self._place.watchers = [watcher for watcher in self._place.watchers if watcher is not self]

    def stored(self, entry: PrefixBlock, group: int) -> None:
        """As BlockWatcher has it."""
        if self._decides(entry, group):
            self._put(Change(entry, True))

    def removed(self, entry: PrefixBlock, group: int, block: int) -> None:
        """As BlockWatcher has it."""
        if self._decides(entry, group):
            self._put(Change(entry, False))

    def take_behind(self) -> bool:
        """Whether all is to be told anew, from a snapshot that is read after this."""
        if not self._is_behind:
            return False
        self._is_behind = False  # nothing is written where it was not so: that it falls behind just now would be lost
        return True

    def fall_behind(self) -> None:
        """Those who follow do not know what is there."""
        self._is_behind = True
        self.has_news.set()

    def take_dropped(self) -> int:
        """Changes that were dropped since this was asked last."""
        now, before = self._num_dropped, self._num_dropped_before
        self._num_dropped_before = now
        return now - before

    def take(self, most: int) -> list[Change]:
        """Changes in order, at most so many."""
        taken: list[Change] = []
        with suppress(IndexError):  # those who change the place may empty it meanwhile, too
            while len(taken) < most:
                taken.append(self._changes.popleft())
        return taken

    def snapshot(self) -> list[Change]:
        """What is there, each behind its parent."""
        return in_order(filter(self._is_there, self._place.entries()))

    def _is_there(self, entry: PrefixBlock) -> bool:
        each = (self._has(entry, group) for group in self._groups)
        return all(each) if self._whole else any(each)

    def _decides(self, entry: PrefixBlock, group: int) -> bool:
        """Whether `entry` came or went with the block of `group`, by what the other groups have."""
        others = (self._has(entry, other) for other in self._groups if other != group)
        return group in self._groups and (all(others) if self._whole else not any(others))

    def _put(self, change: Change) -> None:
        if len(self._changes) >= self._capacity:
            self._num_dropped += len(self._changes) + 1
            self._changes.clear()
            self._is_behind = True
        else:
            self._changes.append(change)
        if not self.has_news.is_set():
            self.has_news.set()
