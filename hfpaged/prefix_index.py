"""The prefix index: published blocks, found again by the chained hash of their tokens, compared before they are used.

Blocks form trees below roots; a root stands for all that besides the tokens decides about keys and values. An evicted
block stays known for a while, without its memory, so that a later miss can be explained.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from operator import itemgetter

from hfpaged.block_hash import ExtraKey, HashFunction, block_hash, root_hash, sha256
from hfpaged.block_table import GONE
from hfpaged.common_runs import common_length
from hfpaged.ghosts import Ghosts
from hfpaged.prefix_block import BlockWatcher, Origin, PrefixBlock, Root, width_of
from hfpaged.usable_prefix import usable_lengths

# Evicted blocks that are remembered, some 600 bytes each.
REMEMBERED = 4096
# Of many blocks that go on behind one parent with the same first token, this many are compared.
COMPARED = 32


@dataclass(frozen=True)
class Match:
    """The longest known prefix: full blocks, and the first `partial_length` tokens of one more. `lost` are blocks
    behind `blocks` that are known as well and cannot be used, up to the first that is not there in full attention.
    """

    blocks: list[PrefixBlock] = field(default_factory=list)
    partial: PrefixBlock | None = None
    partial_length: int = 0
    lost: list[PrefixBlock] = field(default_factory=list)

    @property
    def all_blocks(self) -> list[PrefixBlock]:
        """The full ones, and the partial one if there is one."""
        return self.blocks if self.partial is None else [*self.blocks, self.partial]

    def length(self, block_size: int) -> int:
        """Tokens."""
        return len(self.blocks) * block_size + self.partial_length


@dataclass
class PrefixCounts:
    """Kept for those who report them; tokens, counted once per request when it is admitted."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0  # blocks
    collisions: int = 0  # equal hashes of unequal tokens


class PrefixIndex:
    """Which published block ids hold which tokens, for `windows` by layer group (None: full attention)."""

    def __init__(
        self, windows: Many[int | None], block_size: int, hash_function: HashFunction = sha256,
        clock: Callable[[], float] = time.time, remembered: int | None = None,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.counts = PrefixCounts()
        self._windows = tuple(windows)
        self.whole = [group for group, window in enumerate(self._windows) if window is None]
        self.clock, self._hash = clock, hash_function
        self.watchers: list[BlockWatcher] = []
        self.last_root: Root | None = None  # the one asked for last
        self.num_created = 0  # blocks that were ever known
        self._roots: dict[tuple[ExtraKey, ...], Root] = {}
        self._holder: dict[int, tuple[PrefixBlock, int]] = {}  # block id -> its place
        self._ghosts = Ghosts(REMEMBERED if remembered is None else remembered)
        self._uses = 0

    @property
    def num_blocks(self) -> int:
        """Block ids that are published."""
        return len(self._holder)

    @property
    def num_ghosts(self) -> int:
        """Blocks of tokens that are known without their memory."""
        return len(self._ghosts)

    @property
    def num_roots(self) -> int:
        return len(self._roots)

    @property
    def roots(self) -> list[Root]:
        """The roots that are known, last used first."""
        return sorted(self._roots.values(), key=lambda root: -root.last_use)

    def count_by_group(self, blocks: Iterable[int]) -> list[int]:
        """Of published `blocks` how many belong to each layer group. Those that others evict meanwhile to none."""
        counts = Counter(map(itemgetter(1), filter(None, map(self._holder.get, blocks))))
        return [counts[group] for group in range(len(self._windows))]

    def root(self, keys: Iterable[ExtraKey], width: int = 1) -> Root:
        """The root for these extra keys; one that nobody has published under is not kept."""
        ordered = tuple(sorted((*keys, ExtraKey("width", str(width)))))
        self._uses += 1
        root = self._roots.get(ordered) or Root(ordered, width, root_hash(ordered, self._hash))
        root.last_use = self._uses
        self.last_root = root
        return root

    def settled(self, root: Root) -> Root:
        """The root with the same keys that others have published under first, or `root`."""
        return self._roots.get(root.keys, root)

    def holds(self, block: int) -> bool:
        """Whether a block is published."""
        return block in self._holder

    def held(self) -> set[int]:
        """The ids of all published blocks."""
        return set(self._holder)

    def entries(self) -> list[PrefixBlock]:
        """Those that have a block, in no order, as others may change them meanwhile."""
        holders = list(self._holder.values())  # in one go: no thread comes between
        return list({id(entry): entry for entry, _ in holders}.values())

    def child(self, parent: PrefixBlock | Root, items: array[int], counted: bool = True) -> PrefixBlock | None:
        """The known block with just these items behind `parent`, compared number by number."""
        digest = block_hash(parent.digest, items, self._hash)
        found = parent.children.get(digest)
        if found is not None and found.items != items:
            self.counts.collisions += counted
            return None
        return found

    def publish(
        self, parent: PrefixBlock | Root, items: array[int], blocks: Many[int], origin: Origin | None = None
    ) -> PrefixBlock | None:
        """Make `blocks` (one id per layer group, GONE where there is none) known under `items` behind `parent`, as
        computed by `origin`.

        Where another block with the same items is known already, that one is returned and keeps its ids; only those
        that it lacks are taken. None: the place is taken by other items of the same hash.
        """
        digest = block_hash(parent.digest, items, self._hash)
        if isinstance(parent, Root):
            parent = self._roots.setdefault(parent.keys, parent)
        elif parent.parent.children.get(parent.digest) is not parent:
            return None  # it was forgotten meanwhile: what stands behind it can no longer be found
        entry = parent.children.get(digest)
        if entry is None:
            self.num_created += 1
            entry = PrefixBlock(parent, digest, items, len(self._windows), self.num_created)
            parent.children[digest] = entry
            self._ghosts.has_child(parent)
        elif entry.items != items:
            self.counts.collisions += 1
            return None
        for group, block in enumerate(blocks):
            if entry.blocks[group] == GONE and block != GONE and block not in self._holder:
                entry.blocks[group], entry.evicted_at, entry.origin = block, None, origin
                self._holder[block] = entry, group
                for watcher in self.watchers:
                    watcher.stored(entry, group)
        if entry.is_gone:
            self._remember(entry)
        else:
            self._ghosts.discard(entry)
        return entry

    def forget(self, block: int) -> None:
        """The memory of a published block is used for something else."""
        entry, group = self._holder.pop(block)
        entry.blocks[group] = GONE
        self.counts.evictions += 1
        entry.evicted_at = self.clock()
        try:
            for watcher in self.watchers:
                watcher.removed(entry, group, block)
        finally:
            if entry.is_gone:
                self._remember(entry)

    def lost_below(self, entry: PrefixBlock) -> None:
        """The contents of a block of `entry` are in host memory no longer."""
        if entry.is_gone:
            self._remember(entry)

    def unknown(self, parent: PrefixBlock | Root, items: array[int]) -> PrefixBlock:
        """What a block of `items` behind `parent` would be: to ask others for it. The index does not know it."""
        return PrefixBlock(parent, block_hash(parent.digest, items, self._hash), items, len(self._windows), 0)

    def match(self, root: Root, items: array[int], limit: int, counted: bool = True) -> Match:
        """The longest usable prefix of at most `limit` tokens of `items` (`root.width` numbers each).

        All blocks must be there in groups of full attention; in groups with a window those that the next token sees.
        """
        root = self.settled(root)
        known, beyond = self._walk(root, items, limit, counted)
        usable = self._usable(known)
        partial = self._partial(usable[-1] if usable else root, len(usable), items, limit)
        return Match(usable, *partial, known[len(usable) :] + beyond)

    def _walk(
        self, root: Root, items: array[int], limit: int, counted: bool
    ) -> tuple[list[PrefixBlock], list[PrefixBlock]]:
        """(the known blocks that are there in full attention, the one behind them that is not)."""
        size = self.block_size * root.width
        found: list[PrefixBlock] = []
        parent: PrefixBlock | Root = root
        for start in range(0, limit // self.block_size * size, size):
            entry = self.child(parent, items[start : start + size], counted)
            if entry is None:
                break
            if GONE in entry.blocks and any(entry.blocks[group] == GONE for group in self.whole):
                return found, [entry]
            found.append(entry)
            parent = entry
        return found, []

    def _usable(self, known: list[PrefixBlock]) -> list[PrefixBlock]:
        """As many of `known` as have, in each windowed group, all that the token behind them sees."""
        if not any(self._windows):
            return known
        there = ([block != GONE for block in entry.blocks] for entry in known)
        return known[: max(usable_lengths(there, self._windows, self.block_size), default=0)]

    def _partial(
        self, parent: PrefixBlock | Root, index: int, items: array[int], limit: int
    ) -> tuple[PrefixBlock | None, int]:
        """The block `index` behind `parent` that begins most like the rest of `items`, and with how many tokens."""
        width = width_of(parent)
        start = index * self.block_size
        rest = items[start * width : min(limit, start + self.block_size) * width]
        alike = [c for c in parent.children.values() if rest and c.items[0] == rest[0] and GONE not in c.blocks]
        lengths = [(common_length(child.items, rest) // width, child) for child in alike[-COMPARED:]]
        most, best = max(lengths, key=lambda pair: pair[0], default=(0, None))
        return (best, most) if most else (None, 0)

    def _remember(self, entry: PrefixBlock) -> None:
        """`entry` has no block; the oldest such are forgotten when there are too many."""
        self._ghosts.add(entry)
        for gone in self._ghosts.prune():
            root = gone.root
            if not root.children and self._roots.get(root.keys) is root:
                del self._roots[root.keys]
