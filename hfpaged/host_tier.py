"""Evicted blocks in host memory: a bounded store of rows, the least recently used of which go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from hfpaged.block_rows import BlockRows
from hfpaged.errors import IntegrityError
from hfpaged.prefix_block import BlockWatcher, PrefixBlock

# In the place of a place, of a block that was evicted in the change of the pool that is under way.
PENDING = -1


class Evicted(NamedTuple):
    """A block of a layer group that was evicted, and the id that holds its contents still."""

    entry: PrefixBlock
    group: int
    block: int


class HostTier:
    """At most `size` bytes. What lies at a place stays there until the place is given to another block; `entry.below`
    says where the blocks of an entry lie. A block that was brought back stays too, as the next to go: its contents lie
    in the pool as well, and need not be copied again when they are evicted before that.

    `on_lost` is told of a block, whose row is there still, before its place is given to another, `on_gone` of an entry
    when one of its blocks lies here no longer.
    """

    def __init__(
        self, size: int, on_lost: Callable[[PrefixBlock, int, Tensor], None], on_gone: Callable[[PrefixBlock], None]
    ) -> None:
        self.size = size
        self._on_lost, self._on_gone = on_lost, on_gone
        self._rows: BlockRows | None = None
        self._memory: Tensor | None = None
        self._num_places = 0
        self._free: list[int] = []
        self._held: OrderedDict[int, tuple[PrefixBlock, int]] = OrderedDict()  # by place, the next to go first
        self.watchers: list[BlockWatcher] = []  # of what lies here; their `block` is a place
        self._wanted: set[int] = set()  # places that are about to be read
        self._is_changing = False  # or the last change was broken off

    @property
    def num_blocks(self) -> int:
        """Blocks that lie here."""
        return len(self._held)

    @property
    def num_places(self) -> int:
        """Blocks that there is room for; 0 while it is not known what one takes."""
        return self._num_places

    @property
    def nbytes(self) -> int:
        """What may be taken of the memory of the host; a CPU gives it when it is first written."""
        return 0 if self._memory is None else self._memory.nbytes

    def open(self, rows: BlockRows) -> None:
        """Blocks lie in rows like these from now on. Raises RuntimeError or MemoryError where there is no memory."""
        self.clear()
        self._num_places, self._free, self._memory = 0, [], None
        count = self.size // rows.nbytes if rows.nbytes else 0
        self._memory = rows.make(count)
        self._rows, self._num_places, self._free = rows, count, list(range(count - 1, -1, -1))

    def has(self, entry: PrefixBlock, group: int) -> bool:
        """Whether the block of layer group `group` of an entry lies here."""
        return self.place(entry, group) != PENDING

    def entries(self) -> list[PrefixBlock]:
        """Those that have a block here, in no order, as others may change them meanwhile."""
        held = list(self._held.values())  # in one go: no thread comes between
        return list({id(entry): entry for entry, _ in held}.values())

    def place(self, entry: PrefixBlock, group: int) -> int:
        """Where the block of layer group `group` of an entry lies, PENDING where it lies nowhere."""
        return (entry.below or {}).get(group, PENDING)

    def renew(self, place: int) -> None:
        """What lies there was used now."""
        self._held.move_to_end(place)

    def store(self, evicted: Many[Evicted]) -> int:
        """Copy blocks of one layer group here, the last ones where not all have room; how many were."""
        if self._rows is None or self._memory is None:
            return 0
        with self._changing():
            room = self._num_places - len(self._wanted)
            kept = evicted[max(len(evicted) - room, 0) :]
            self._make_room(len(kept))
            places = self._free[len(self._free) - len(kept) :]
            if kept:
                self._rows.take(kept[0].group, [each.block for each in kept], self._memory, places)
            for each, place in zip(reversed(kept), reversed(places), strict=True):
                self._free.pop()
                self._held[place] = each.entry, each.group
                each.entry.below = (each.entry.below or {}) | {each.group: place}
                for watcher in self.watchers:
                    watcher.stored(each.entry, each.group)
            for place in places:  # the first one evicted is the first to go
                self._held.move_to_end(place)
        return len(kept)

    def restore(self, group: int, places: Many[int], blocks: Many[int]) -> None:
        """Copy what lies at `places` into blocks of the pool."""
        assert self._rows is not None
        assert self._memory is not None
        self._rows.put(group, self._memory, places, blocks)
        for place in places:
            self._held.move_to_end(place, last=False)

    @contextmanager
    def reading(self, places: Iterable[int]) -> Iterator[None]:
        """What lies there stays until it has been read."""
        self._wanted = set(places)
        try:
            yield
        finally:
            self._wanted = set()

    def clear(self) -> int:
        """Forget all; how many blocks lay here. None of them is lost: nobody wants them."""
        with self._changing():
            places = list(self._held)
            for place in places:
                self._forget(place)
        return len(places)

    def check_integrity(self) -> None:
        """Recount the places. Raises IntegrityError."""
        if self._is_changing:
            self._recover()
        places = sorted([*self._free, *self._held])
        if places != list(range(self._num_places)):
            raise IntegrityError(f"places {places} are free or in use; each of {self._num_places} should be, once")
        for place, (entry, group) in self._held.items():
            if self.place(entry, group) != place:
                raise IntegrityError(f"place {place} holds a block that is said to lie at {entry.below}")
            if entry.parent.children.get(entry.digest) is not entry:
                raise IntegrityError(f"place {place} holds a block that nobody can find")

    def _make_room(self, count: int) -> None:
        """Free `count` places, of which there must be so many."""
        assert self._memory is not None
        can_go = (place for place in self._held if place not in self._wanted)
        for place in list(islice(can_go, max(count - len(self._free), 0))):
            self._on_lost(*self._held[place], self._memory[place])
            self._forget(place)

    def _forget(self, place: int) -> None:
        entry, group = self._held[place]
        if entry.below is not None:  # first of all, so that nobody reads there whatever happens
            entry.below.pop(group, None)
            entry.below = entry.below or None
        del self._held[place]
        self._free.append(place)
        self._tell_gone(entry, group, place)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What was broken off, by Ctrl-C say, is put in order before anything else changes."""
        if self._is_changing:
            self._recover()
        self._is_changing = True
        yield
        self._is_changing = False

    def _recover(self) -> None:
        """A block lies here if its entry and its place both say so."""
        free = set(range(self._num_places)) - self._held.keys()
        for place, (entry, group) in list(self._held.items()):
            if self.place(entry, group) != place:
                del self._held[place]
                free.add(place)
                self._tell_gone(entry, group, place)
        self._free = sorted(free)
        self._is_changing = False

    def _tell_gone(self, entry: PrefixBlock, group: int, place: int) -> None:
        for watcher in self.watchers:
            watcher.removed(entry, group, place)
        self._on_gone(entry)
