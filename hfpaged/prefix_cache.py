"""Published prefixes over the sequences of one block manager: what a sequence computed, others begin with.

As vLLM's automatic prefix caching, with the tokens compared on a hit and partly equal blocks copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Protocol

from hfpaged.block_hash import ExtraKey, HashFunction, salt_key, sha256
from hfpaged.block_manager import BlockManager
from hfpaged.block_table import GONE, BlockTable
from hfpaged.errors import IntegrityError
from hfpaged.layer_groups import visible_offset
from hfpaged.prefix_block import Origin, PrefixBlock, Root
from hfpaged.prefix_index import Match, PrefixIndex
from hfpaged.sequence import Sequence
from hfpaged.token_chain import TokenChain


class Restoring(Protocol):
    """To bring back what is known below the pool of one prompt, besides what `match` has in it."""

    def length(self, match: Match) -> int: ...
    def bring(self, match: Match, holder: BlockTable) -> Match: ...


class Below(Protocol):
    """The tiers below a pool."""

    def restoring(self, root: Root, items: array[int], limit: int) -> Restoring: ...
    def is_coming(self, root: Root, items: array[int], limit: int, match: Match) -> bool: ...
    def used(self, match: Match) -> None: ...


class PrefixCache:
    """Publishes full blocks of sequences and lets others begin with them. `windows` by layer group; `remembered`
    evicted blocks stay known, for those who ask why there was no hit, None for the usual number.
    """

    def __init__(
        self, manager: BlockManager, windows: Many[int | None], hash_function: HashFunction = sha256,
        remembered: int | None = None,
    ) -> None:  # fmt: skip
        self.index = PrefixIndex(windows, manager.block_size, hash_function, remembered=remembered)
        self._manager, self._pool = manager, manager.pool
        self._windows = tuple(windows)
        self._pins: dict[tuple[tuple[ExtraKey, ...], bytes], Sequence] = {}
        self._pool.on_evict = self.index.forget
        self.lower: Below | None = None

    def longest(self, root: Root, items: array[int], limit: int) -> Match:
        """The longest known prefix of `items`, at most `limit` tokens."""
        return self.index.match(root, items, limit)

    @contextmanager
    def fetched(
        self, root: Root, items: array[int], limit: int, match: Match | None = None
    ) -> Iterator[Match]:  # fmt: skip
        """The longest known prefix (`match`, if that is known) with what has come back from the tiers below, as far as
        that pays. Nothing of it is evicted meanwhile.
        """
        match = self.longest(root, items, limit) if match is None else match
        if self.lower is None or len(match.blocks) == limit // self._manager.block_size:
            yield match
            return
        holder = self._manager.create()
        try:
            yield self.lower.restoring(root, items, limit).bring(match, holder.tables[0])
        finally:
            self._manager.free(holder)

    def reach(self, root: Root, items: array[int], limit: int, match: Match) -> int:
        """How many tokens `fetched` will find, where `match` is what is known without it."""
        known = match.length(self._manager.block_size)
        return known if self.lower is None else self.lower.restoring(root, items, limit).length(match)

    def is_coming(self, root: Root, items: array[int], limit: int, match: Match) -> bool:
        """Whether `fetched` will find more soon, and nothing of it need be computed."""
        if self.lower is None or len(match.blocks) == limit // self._manager.block_size:
            return False
        return self.lower.is_coming(root, items, limit, match)

    def attach(self, sequence: Sequence, root: Root, items: array[int], match: Match) -> int:
        """Let an empty sequence begin with `match`, a prefix of `items`; returns its tokens. The last block is copied
        before it is written, if the match ends inside of it.
        """
        block_size = self._manager.block_size
        length = match.length(block_size)
        if self.lower is not None and match.blocks:
            self.lower.used(match)
        entries = match.blocks if match.partial is None else [*match.blocks, match.partial]
        for group, (table, window) in enumerate(zip(sequence.tables, self._windows, strict=True)):
            first = visible_offset(length, window) // block_size
            table.attach([entry.blocks[group] for entry in entries[first:]], first, length)
        sequence.chain = TokenChain(root, items[: length * root.width], list(match.blocks))
        return length

    def publish(self, sequence: Sequence, merge: bool = True, origin: Origin | None = None) -> None:
        """Let others find the full blocks of a sequence whose tokens are known, computed by `origin`. Where a block
        with the same tokens is published already, the sequence uses that one and gives its own back, if it may `merge`.
        """
        chain, block_size = sequence.chain, self._manager.block_size
        if chain is not None and chain.length != sequence.length:  # by a Ctrl-C between the two: never to be found,
            chain = sequence.chain = None  # for cut to one length they would only seem to be the same tokens
        if chain is None:
            return
        while len(chain.blocks) < chain.length // block_size:
            entry = self._publish_block(sequence, chain, len(chain.blocks), merge, origin)
            if entry is None:
                sequence.chain = None  # another block has this hash: nothing behind it can be found
                return
            chain.blocks.append(entry)

    def _publish_block(
        self, sequence: Sequence, chain: TokenChain, number: int, merge: bool, origin: Origin | None
    ) -> PrefixBlock | None:
        parent = chain.blocks[-1] if chain.blocks else chain.root
        own = [table.block(number) for table in sequence.tables]
        try:
            entry = self.index.publish(parent, chain.block_items(number, self._manager.block_size), own, origin)
        finally:  # Ctrl-C too: what the index knows the pool knows
            for block in own:
                if self.index.holds(block):
                    self._pool.publish(block)
        if entry is not None and merge:
            for table, block, published in zip(sequence.tables, own, entry.blocks, strict=True):
                if block != published and GONE not in (block, published):
                    table.replace(number, published)
        return entry

    def pin(self, root: Root, items: array[int]) -> int:
        """Keep the known full blocks of `items` from eviction; how many tokens that are. Pinning again renews it."""
        match = self.index.match(root, items, len(items) // root.width)
        sequence = self._manager.create()
        length = self.attach(sequence, root, items, Match(match.blocks))
        self.unpin(root, items)
        if not length:
            self._manager.free(sequence)
            return 0
        self._pins[root.keys, items.tobytes()] = sequence
        return length

    def unpin(self, root: Root, items: array[int]) -> bool:
        """Undo `pin`; whether there was one."""
        sequence = self._pins.pop((root.keys, items.tobytes()), None)
        if sequence is not None:
            self._manager.free(sequence)
        return sequence is not None

    @property
    def pinned_sequences(self) -> list[Sequence]:
        """Those that hold what is pinned, the first one first."""
        return list(self._pins.values())

    def pinned(self, items: array[int]) -> list[Root]:
        """The roots under which just these `items` are pinned."""
        chains = [sequence.chain for (_, raw), sequence in self._pins.items() if raw == items.tobytes()]
        return [chain.root for chain in chains if chain is not None]

    def last_root(self, salt: str | None, adapter: str | None) -> Root | None:
        """The root of plain tokens for this salt and this adapter that was used last."""
        roots = self.index.roots
        return next((root for root in roots if root.width == 1 and is_for(root, salt, adapter)), None)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Nobody finds these blocks any more: their contents are about to change."""
        for block in blocks:
            if self._pool.is_published(block):
                self._pool.evict(block)

    def check_integrity(self) -> None:
        """Each published block is known to the pool and to the index, and no other. Raises IntegrityError."""
        known, published = self.index.held(), self._pool.published()
        if known != published:
            off = known ^ published
            raise IntegrityError(f"published blocks {sorted(published)}, the index knows {sorted(known)}", off)


def is_for(root: Root, salt: str | None, adapter: str | None) -> bool:
    """Whether `root` is that of this salt and of no adapter but this one, None for without."""
    adapters = [key.value for key in root.keys if key.kind == "adapter"]
    wanted = None if salt is None else salt_key(salt).value
    return root.value("salt") == wanted and adapters == ([] if adapter is None else [adapter])
