"""Published blocks whose memory is gone: they stay known for a while, so that a later miss can be explained."""

from __future__ import annotations

from collections import OrderedDict

from hfpaged.prefix_block import PrefixBlock


class Ghosts:
    """At most `limit` blocks of the trees, and those besides that lead to blocks which still have memory: of layers
    with a window, whose first blocks go before their last. The oldest are let go first, from the ends of the trees.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: dict[int, PrefixBlock] = {}  # by identity
        self._ends: OrderedDict[int, PrefixBlock] = OrderedDict()  # those without children, oldest first

    def __len__(self) -> int:
        return len(self._all)

    def add(self, entry: PrefixBlock) -> None:
        """The last block of `entry` is gone."""
        self._all[id(entry)] = entry
        if not entry.children:
            self._ends[id(entry)] = entry

    def discard(self, entry: PrefixBlock) -> None:
        """`entry` has a block again."""
        self._all.pop(id(entry), None)
        self._ends.pop(id(entry), None)

    def has_child(self, entry: object) -> None:
        """Something stands behind `entry` now."""
        self._ends.pop(id(entry), None)

    def prune(self) -> list[PrefixBlock]:
        """Take what is too much out of the trees; what that was."""
        taken = []
        while len(self._all) > self._limit and self._ends:
            _, entry = self._ends.popitem(last=False)
            del self._all[id(entry)]
            del entry.parent.children[entry.digest]
            taken.append(entry)
            parent = self._all.get(id(entry.parent))
            if parent is not None and not parent.children:
                self._ends[id(parent)] = parent
                self._ends.move_to_end(id(parent), last=False)
        return taken
