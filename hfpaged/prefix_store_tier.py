"""A prefix store as the tier below a pool: what the pool computes is written, what others wrote comes into it.

All full blocks are written soon after they were computed, not only those that are evicted or found again: another
service may want a prompt that came here once, while this one runs on or after it was killed. Those that nobody wants
are the first to make room.
"""

from __future__ import annotations

import os
import time
import weakref
from array import array
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

from hfpaged.block_rows import BlockRows
from hfpaged.block_table import GONE
from hfpaged.config import DEFAULT_STORE_SIZE, format_bytes, parse_bytes
from hfpaged.errors import PrefixFileError
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_manifest import LayerKind
from hfpaged.prefix_store import PrefixStore
from hfpaged.prefix_store_block import Addresses, BlockAddress, StoreFacts
from hfpaged.prefix_store_layout import StoreLayout
from hfpaged.prefix_store_reader import StoreReader
from hfpaged.prefix_store_writer import Copied, Published, StoreWriter
from hfpaged.prefix_stores import stores_for

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool

# A file that was there is looked for again after so long; of a block that is used again and again, so rarely.
_KNOWN_SECONDS, _USED_SECONDS = 1.0, 60.0
_MOST_KNOWN = 2**16


class StoreTier:
    """See Tier. With `reads_ahead` blocks are read by `fetch` before they are wanted, and only those are found."""

    def __init__(self, pool: KVPool, store: PrefixStore) -> None:
        self.store, self.reads_ahead = store, False
        self._pool = weakref.ref(pool)
        self._addresses = Addresses(store.facts)
        self.writer = StoreWriter(store, self._take)
        self.reader = StoreReader(store)
        self._is_looking = False
        self._known: dict[str, float] = {}  # when a file was seen
        self._used: dict[bytes, float] = {}
        self._layout: StoreLayout | None = None
        weakref.finalize(pool, _end, self.writer, self.reader).atexit = False

    def __str__(self) -> str:
        folder = self.store.folder
        return f"a prefix store in {str(folder.path)!r}, at most {format_bytes(folder.limit)}"

    @property
    def has_read(self) -> bool:
        """See Tier."""
        return self.reads_ahead and not self._is_looking

    def wants(self, entry: PrefixBlock, group: int) -> bool:
        """See Tier."""
        address = self._addresses.of(entry)
        return address is not None and not self._is_there(address, group)

    def put(self, entry: PrefixBlock, group: int, row: Tensor) -> None:
        """See Tier."""
        address, pool = self._addresses.of(entry), self._pool()
        if address is None or pool is None or pool.swapping is None or self._is_there(address, group):
            return
        layout = self._layout_of(pool.swapping.rows())
        if self.writer.has_room(layout.rows.nbytes):
            block = layout.split(address, group, row.clone())
            if block is not None:
                self.writer.write(block)

    def find(self, entry: PrefixBlock) -> Collection[int]:
        """See Tier."""
        address = self._addresses.of(entry)
        if address is None:
            return ()
        return [group for group in range(len(self.store.facts.groups)) if self._can_read(address, group)]

    def read(self, entry: PrefixBlock, group: int, row: Tensor) -> bool:
        """See Tier."""
        address, pool = self._addresses.of(entry), self._pool()
        found = None if address is None else self.reader.take(address, group)
        if found is None or pool is None or pool.swapping is None:
            return False
        return self._layout_of(pool.swapping.rows()).join(group, found, row)

    def fetch(self, wanted: Iterable[tuple[PrefixBlock, int]]) -> bool:
        """See Tier."""
        pool = self._pool()
        if not self.reads_ahead or pool is None or pool.swapping is None:
            return False
        for nbytes, seconds in self.reader.timings():
            pool.swapping.costs.told_copy("below", nbytes, seconds)
        found = [(address, group) for entry, group in wanted if (address := self._addresses.of(entry)) is not None]
        return self.reader.fetch(found, pool.swapping.rows().nbytes) if found else False

    def wait(self, seconds: float) -> None:
        """See Tier."""
        self.reader.wait(seconds)

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """See Tier."""
        self._is_looking = self.reads_ahead
        try:
            yield
        finally:
            self._is_looking = False

    def stored(self, entry: PrefixBlock, group: int) -> None:
        """See BlockWatcher: a block was published."""
        address = self._addresses.of(entry)
        if address is not None:
            self._note_used(entry, time.monotonic())
            self.writer.publish(Published(entry, group, address))

    def removed(self, entry: PrefixBlock, group: int, block: int) -> None:
        """See BlockWatcher."""

    def prepare(self, root: Root, items: array[int], limit: int) -> None:
        """See Tier."""
        pool, size = self._pool(), self.store.facts.block_size * root.width
        models = [] if pool is None else pool.user_models()
        if pool is None or not models:
            return
        blocks = (items[start : start + size] for start in range(0, limit // self.store.facts.block_size * size, size))
        layers = self._layers_of(self._addresses.behind(root, blocks))
        with suppress(PrefixFileError):  # layers on several devices, known when the first key has come
            stores_for(pool, layers, models[0], str(self))

    def used(self, entries: Iterable[PrefixBlock]) -> None:
        """See Tier: they must stay in the store as long as they are wanted here."""
        now = time.monotonic()
        for entry in entries:
            if now - self._used.get(entry.digest, -_USED_SECONDS) >= _USED_SECONDS:
                for group, block in enumerate(entry.blocks):
                    if block != GONE:
                        self.stored(entry, group)

    @property
    def holds(self) -> tuple[int, int]:
        """See Tier."""
        return self.store.folder.num_files, self.store.folder.num_bytes

    def read_ahead(self) -> None:
        """See Tier."""
        self.reads_ahead = True

    def settle(self, seconds: float) -> None:
        """See Tier."""
        self.writer.flush(seconds)

    def clear(self) -> None:
        """See Tier: files belong to others as well, and stay."""
        self.writer.forget()

    def check_integrity(self) -> None:
        """See Tier: there is nothing that two places say."""

    def _note_used(self, entry: PrefixBlock, now: float) -> None:
        if len(self._used) >= _MOST_KNOWN:
            self._used.clear()
        self._used[entry.digest] = now

    def _can_read(self, address: BlockAddress, group: int) -> bool:
        if self.reader.is_staged(address, group):
            return True
        return not self.has_read and self._is_there(address, group)

    def _is_there(self, address: BlockAddress, group: int) -> bool:
        """Whether there is a file, or was one a moment ago."""
        name, now = address.name(group), time.monotonic()
        if now - self._known.get(name, -_KNOWN_SECONDS) < _KNOWN_SECONDS:
            return True
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        is_there = self.reader.may_be_there(address, group)
        if is_there:
            self._known[name] = now
        return is_there

    def _layers_of(self, chain: Iterable[BlockAddress]) -> dict[int, LayerKind]:
        """What the first blocks of a chain say of the layers, as soon as there is one of each layer group."""
        groups, layers = range(len(self.store.facts.groups)), dict[int, LayerKind]()
        found: set[int] = set()
        for address in chain:
            blocks = {group: self.store.get(address, group) for group in groups if group not in found}
            found |= {group for group, block in blocks.items() if block is not None}
            for block in blocks.values():
                layers |= dict(block.layers) if block else {}
            if not found or len(found) == len(groups):
                break
        return layers if len(found) == len(groups) else {}

    def _take(self, wanted: Many[Published]) -> list[Copied]:
        """What is still there of published blocks; called by the writer's thread."""
        pool = self._pool()
        if pool is None:
            return []
        found: list[Copied | None] = []
        with pool.changing():
            assert pool.swapping is not None
            layout = self._layout_of(pool.swapping.rows())
            for group, few in groupby(wanted, key=lambda block: block.group):
                there = [each for each in few if each.entry.blocks[group] != GONE]
                memory = layout.rows.make(len(there))
                layout.rows.take(group, [each.entry.blocks[group] for each in there], memory, range(len(there)))
                layout.rows.settle()
                found += [layout.split(each.address, group, row) for each, row in zip(there, memory, strict=True)]
        return [block for block in found if block is not None]

    def _layout_of(self, rows: BlockRows) -> StoreLayout:
        if self._layout is None or self._layout.rows is not rows:
            self._layout = StoreLayout(self.store.facts, rows)
        return self._layout


def add_prefix_store(
    pool: KVPool, path: str | os.PathLike[str], size: int | str = DEFAULT_STORE_SIZE
) -> StoreTier:  # fmt: skip
    """Let a pool begin with what others wrote into a directory, of at most `size` bytes, and write there what it
    computes. Raises InvalidConfigError for a directory that cannot be used or a size that is none.
    """
    facts = StoreFacts(pool.block_size, pool.kv_format, pool.groups)
    tier = StoreTier(pool, PrefixStore(path, facts, parse_bytes(size, "prefix_store_size")))
    pool.add_tier(tier)
    pool.counts.store = tier.store.counts
    with pool.changing():
        pool.prefixes.index.watchers.append(tier)
    return tier


def _end(writer: StoreWriter, reader: StoreReader) -> None:
    writer.end()
    reader.end()
