"""What changes among the published blocks, handed from the threads that change a pool to the one that publishes.

A change waits as (block, whether it is there now). Where too many wait they are dropped, and what is there is told
anew: whoever follows is told first that all is gone. A snapshot may be read beside changes: each change that it has
seen already comes again behind it, and telling that a block is there, or not, does no harm when it is told twice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence as Many
from operator import attrgetter
from typing import NamedTuple

from hfpaged.block_table import GONE
from hfpaged.prefix_block import PrefixBlock
from hfpaged.prefix_index import PrefixIndex


class Change(NamedTuple):
    entry: PrefixBlock
    is_there: bool


class BlockFeed:
    """A BlockWatcher. A block of tokens is there while all layer groups of full attention have it, for without one of
    them nothing can begin with it; in models that have no such group, while any group has it.
    """

    def __init__(self, index: PrefixIndex, windows: Many[int | None], capacity: int) -> None:
        self._index, self._capacity = index, capacity
        self._whole = [group for group, window in enumerate(windows) if window is None]
        self._changes: deque[Change] = deque()
        self._is_behind = True  # all that is there is to be told
        self._num_dropped = self._num_dropped_before = 0
        self.has_news = threading.Event()

    def start(self) -> None:
        """Tell of all that is there, and of what changes from now on."""
        self._index.watchers = [*self._index.watchers, self]  # others may be going through the old list
        self.has_news.set()

    def stop(self) -> None:
        """Changes are no longer noticed; those that wait can still be taken."""
        self._index.watchers = [watcher for watcher in self._index.watchers if watcher is not self]

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
        was_behind, self._is_behind = self._is_behind, False
        return was_behind

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
        try:
            while len(taken) < most:
                taken.append(self._changes.popleft())
        except IndexError:  # those who change the pool may empty it meanwhile, too
            pass
        return taken

    def snapshot(self) -> list[PrefixBlock]:
        """What is there, each behind its parent."""
        return sorted(filter(self.is_there, self._index.entries()), key=attrgetter("number"))

    def is_there(self, entry: PrefixBlock) -> bool:
        """Now."""
        return all(entry.blocks[group] != GONE for group in self._whole) if self._whole else not entry.is_gone

    def _decides(self, entry: PrefixBlock, group: int) -> bool:
        """Whether `entry` came or went with the block of `group`, by what the other groups have."""
        if not self._whole:
            return all(block == GONE for other, block in enumerate(entry.blocks) if other != group)
        return group in self._whole and all(entry.blocks[other] != GONE for other in self._whole if other != group)

    def _put(self, change: Change) -> None:
        if len(self._changes) >= self._capacity:
            self._num_dropped += len(self._changes) + 1
            self._changes.clear()
            self._is_behind = True
        else:
            self._changes.append(change)
        if not self.has_news.is_set():
            self.has_news.set()
