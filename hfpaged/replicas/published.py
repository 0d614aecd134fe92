"""What a replica tells of its prefixes: the hashes by which requests that begin so find it."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence as Many
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hfpaged.block_table import GONE
from hfpaged.prefix_block import BlockWatcher, PrefixBlock, Root
from hfpaged.replicas.routing_hash import RoutingHash

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool

# Hashes that are told at most, 8 bytes each: 16 KiB each second from a replica to each that sends to it.
MOST_TOLD = 2048
# Of larger pools, so many times the limit of the last used blocks are looked at, which takes 5 ms.
LOOKED_AT = 8
# Chains remembered beside those that are there: blocks may come behind one that has left its window.
REMEMBERED = 4096


class _Place:
    """Of a block that a request can begin with: `depth` blocks from the root, itself included, with `behind` others
    right behind it.
    """

    __slots__ = ("behind", "depth", "number")

    def __init__(self, depth: int) -> None:
        self.number, self.depth, self.behind = 0, depth, 0

    @property
    def tells_much(self) -> bool:
        """Whether chains part or end here, or it stands for those about it."""
        return self.behind != 1 or self.depth & (self.depth - 1) == 0


class PublishedPrefixes:
    """A watcher of a pool's prefix index (see BlockWatcher): the blocks that a request can begin with, by their routing
    hash; the last ones are those that were computed, or computed behind, last. O(1) for each that comes or goes.

    `below` is the watcher of the host memory below the pool: what lies there is there, and was used before all else.
    """

    def __init__(self, routing_hash: RoutingHash, windows: Many[int | None]) -> None:
        self._hash, self._lock = routing_hash, threading.Lock()
        whole = [group for group, window in enumerate(windows) if window is None]
        self._needed = whole or range(len(windows))  # layer groups without whose block nothing behind is found
        self._places: OrderedDict[bytes, _Place] = OrderedDict()
        self._known: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # hash and depth, by a block's number
        self.below = _Below(self)

    def __len__(self) -> int:
        return len(self._places)

    def stored(self, entry: PrefixBlock, group: int) -> None:
        """See BlockWatcher."""
        if not self._is_there(entry):
            return
        digest = self._add(entry)
        with self._lock:
            if (parent := self._place_of(entry.parent)) is not None:
                self._places.move_to_end(parent[0])
            self._places.move_to_end(digest)

    def stored_below(self, entry: PrefixBlock) -> None:
        """The same in host memory."""
        if self._is_there(entry):
            self._add(entry)

    def removed(self, entry: PrefixBlock, group: int, block: int) -> None:
        """See BlockWatcher."""
        if self._is_there(entry) or (place := self._place_of(entry)) is None:
            return
        with self._lock:
            del self._places[place[0]]
            if (parent := self._place_of(entry.parent)) is not None:
                parent[1].behind -= 1

    def hottest(self, limit: int = MOST_TOLD) -> bytes:
        """The hashes of at most `limit` blocks behind each other, the last used ones first. From any thread.

        Where there are more blocks, those are told behind which chains part or end, and of the others those whose
        depth is a power of two: a request that leaves a chain between two of them is taken for at least half as well
        known as it is. What is left of the limit is filled up.
        """
        with self._lock:
            digests = list(itertools.islice(reversed(self._places), LOOKED_AT * limit))
        if len(digests) > limit:
            digests = list(dict.fromkeys([*filter(self._tells_much, digests), *digests]))[:limit]
        return b"".join(digests)

    def _tells_much(self, digest: bytes) -> bool:
        place = self._places.get(digest)
        return place is not None and place.tells_much

    def _is_there(self, entry: PrefixBlock) -> bool:
        """Whether a request can begin with it, for all that layer groups with a window have."""
        below = entry.below or ()
        return all(entry.blocks[needed] != GONE or needed in below for needed in self._needed) and _is_plain(entry.root)

    def _add(self, entry: PrefixBlock) -> bytes:
        """One that is new here comes before all others."""
        digest, depth = self._of(entry)
        with self._lock:
            if (place := self._places.get(digest)) is None:
                place = self._places[digest] = _Place(depth)
                self._places.move_to_end(digest, last=False)
                if (parent := self._place_of(entry.parent)) is not None:
                    parent[1].behind += 1
            place.number = entry.number
        return digest

    def _place_of(self, block: PrefixBlock | Root) -> tuple[bytes, _Place] | None:
        """Hash and place of just this block, None where it is not there."""
        digest, _ = self._known.get(block.number, (b"", 0)) if isinstance(block, PrefixBlock) else (b"", 0)
        place = self._places.get(digest)
        return None if place is None or place.number != getattr(block, "number", 0) else (digest, place)

    def _of(self, entry: PrefixBlock) -> tuple[bytes, int]:
        """Hash and depth of a block, by those of the nearest block before it that is remembered."""
        missing: list[PrefixBlock] = []
        at: PrefixBlock | Root = entry
        while isinstance(at, PrefixBlock) and at.number not in self._known:
            missing.append(at)
            at = at.parent
        digest, depth = self._known[at.number] if isinstance(at, PrefixBlock) else (self._hash.root(at.keys), 0)
        for each in reversed(missing):
            digest, depth = self._hash.block(digest, each.items), depth + 1
            self._known[each.number] = digest, depth
        while len(self._known) > 2 * len(self._places) + REMEMBERED:
            self._forget()
        return digest, depth

    def _forget(self) -> None:
        """The hash that was made first, unless its block is there."""
        number, known = self._known.popitem(last=False)
        place = self._places.get(known[0])
        if place is not None and place.number == number:
            self._known[number] = known


class _Below:
    """Of blocks in host memory, whose `block` is a place there."""

    def __init__(self, published: PublishedPrefixes) -> None:
        self._published = published

    def stored(self, entry: PrefixBlock, group: int) -> None:
        self._published.stored_below(entry)

    def removed(self, entry: PrefixBlock, group: int, block: int) -> None:
        self._published.removed(entry, group, block)


def watch_prefixes(pool: KVPool, routing_hash: RoutingHash) -> PublishedPrefixes:
    """Follow what `pool`, and host memory below it, have and get."""
    published = PublishedPrefixes(routing_hash, [group.window for group in pool.groups])
    with pool.changing():
        for place, watcher in _places(pool, published):
            for entry in sorted(place.entries(), key=attrgetter("number")):
                watcher.stored(entry, 0)
            place.watchers = [*place.watchers, watcher]
    return published


def unwatch_prefixes(pool: KVPool, published: PublishedPrefixes) -> None:
    """Undo `watch_prefixes`."""
    with pool.changing():
        for place, watcher in _places(pool, published):
            place.watchers = [each for each in place.watchers if each is not watcher]


def _places(pool: KVPool, published: PublishedPrefixes) -> list[tuple[Any, BlockWatcher]]:
    """Where blocks are, and who watches it."""
    host = pool.swapping.host if pool.swapping is not None else None
    below: list[tuple[Any, BlockWatcher]] = [] if host is None else [(host, published.below)]
    return [*below, (pool.prefixes.index, published)]


def _is_plain(root: Root) -> bool:
    """Whether its blocks are of token ids and nothing else, as those of a request's prompt are."""
    return root.width == 1 and not any(key.kind.startswith("input") for key in root.keys)
