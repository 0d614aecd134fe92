"""Texts over a pool with tiers below it, driven as caches drive their rows. What stands in each slot is a
number made of all tokens up to there, so that a block with the contents of another is found.
"""

from __future__ import annotations

import contextlib
import zlib
from array import array
from itertools import count

import torch

from hfpaged import KVPool
from hfpaged.block_hash import ExtraKey
from hfpaged.errors import OutOfBlocksError
from hfpaged.kv_format import FORMATS
from hfpaged.layer_groups import LayerGroup, visible_offset

SIZE = 4


def number_of(keys, text, layer):
    """What the key of the last token of a text is in a layer."""
    return zlib.crc32(repr((keys, text, layer)).encode()) % 2**24


class FakeTier:
    """A tier below host memory: whatever is put, of which `damaged` can be read no longer."""

    def __init__(self, most=10**9):
        self.rows, self.damaged, self.most = {}, False, most
        self.calls = []

    has_read = False

    @property
    def holds(self):
        """Asked for by whoever reads the metrics of this process, of tests that come later too."""
        return len(self.rows), sum(row.nbytes for row in self.rows.values())

    def wants(self, entry, group):
        return (self._name(entry), group) not in self.rows

    def prepare(self, root, items, limit):
        pass

    def used(self, entries):
        pass

    def fetch(self, wanted):
        return False

    def looking_ahead(self):
        return contextlib.nullcontext()

    def wait(self, seconds):
        pass

    def put(self, entry, group, row):
        self.calls.append("put")
        self.rows[self._name(entry), group] = row.clone()
        while len(self.rows) > self.most:
            del self.rows[next(iter(self.rows))]

    def find(self, entry):
        name = self._name(entry)
        return [group for kept, group in self.rows if kept == name]

    def read(self, entry, group, row):
        self.calls.append("read")
        kept = self.rows.get((self._name(entry), group))
        if self.damaged or kept is None:
            row.fill_(1)
            return False
        row.copy_(kept)
        return True

    def clear(self):
        self.rows.clear()

    def check_integrity(self):
        pass

    def _name(self, entry):
        items = []
        while hasattr(entry, "items"):
            items.append(entry.items.tobytes())
            entry = entry.parent
        return (entry.keys, *reversed(items))


class SwappedTexts:
    """`places`: blocks that host memory has room for."""

    def __init__(self, num_blocks, places, windows=(None,), debug=False, max_cached=None):
        self.groups = tuple(LayerGroup(window, (number,)) for number, window in enumerate(windows))
        row = 2 * 1 * SIZE * 4
        self.pool = KVPool(
            self.groups, block_size=SIZE, kv_format=FORMATS["auto"], num_blocks=num_blocks, debug=debug,
            swap_space=places * row,
        )  # fmt: skip
        self.pool.blocks.max_cached = max_cached
        like = torch.zeros(1, 1, 0, 1)
        self.stores = []
        for group in self.groups:
            store = self.pool.storage.store(0, like, like, group.layers[0])
            self.pool.settle_size(group.layers[0], store)
            self.stores.append(store)
        self.windows = windows
        self.texts, self.roots = {}, {}
        self._names = count()

    @property
    def counts(self):
        return self.pool.swapping.counts

    def root(self, salt=""):
        return self.pool.prefixes.index.root([ExtraKey("salt", salt)])

    def start(self, tokens, salt="", limit=None):
        """A new sequence: begins with what is known and computes the rest. Returns (it, known tokens)."""
        items, root = array("q", tokens), self.root(salt)
        limit = max(len(tokens) - 1, 0) if limit is None else limit
        prefixes = self.pool.prefixes
        with self.pool.changing() as manager:
            sequence = manager.create()
            self.texts[sequence], self.roots[sequence] = [], root
            try:
                with prefixes.fetched(root, items, limit) as match:
                    known = prefixes.attach(sequence, root, items, match)
            except BaseException:
                manager.free(sequence)
                del self.texts[sequence], self.roots[sequence]
                raise
            self.texts[sequence] = list(tokens[:known])
        self.check(sequence)
        try:
            self.append(sequence, tokens[known:])
        except OutOfBlocksError:
            self.free(sequence)
            raise
        return sequence, known

    def append(self, sequence, tokens):
        if not tokens:
            return
        with self.pool.changing() as manager:
            manager.release_left([sequence])
            copies = manager.grow([(sequence, len(tokens))])
        for store in self.stores:
            store.reserve(self.pool.blocks.high_water, self.pool.num_blocks)
        for store, of_group in zip(self.stores, copies, strict=True):
            if of_group:
                store.copy_blocks(of_group)
        self._write(sequence, tokens)
        with self.pool.changing() as manager:
            sequence.chain.items.extend(tokens)
            self.pool.prefixes.publish(sequence)
            manager.release_left([sequence])

    def _write(self, sequence, tokens):
        text, keys = self.texts[sequence], self.roots[sequence].keys
        for token in tokens:
            text.append(token)
            for group, table in enumerate(sequence.tables):
                block, offset = divmod(table.slot(len(text) - 1), SIZE)
                assert not self.pool.blocks.is_published(block), "a published block is written"
                for number, part in enumerate(("key", "value")):
                    value = number_of(keys, text, 2 * group + number)
                    self.stores[group].contents(part)[block, 0, offset, 0] = value

    def fork(self, sequence):
        with self.pool.changing() as manager:
            child = manager.fork(sequence)
        self.texts[child], self.roots[child] = self.texts[sequence][:], self.roots[sequence]
        return child

    def trim(self, sequence, length):
        with self.pool.changing() as manager:
            manager.check_trim(sequence, length)
            manager.trim(sequence, length)
        del self.texts[sequence][length:]

    def free(self, sequence):
        with self.pool.changing() as manager:
            manager.free(sequence)
        del self.texts[sequence], self.roots[sequence]

    def free_all(self):
        for sequence in list(self.texts):
            self.free(sequence)

    def run(self, tokens, salt=""):
        """Start and free; the tokens that were known."""
        sequence, known = self.start(tokens, salt)
        self.free(sequence)
        return known

    def check(self, *sequences):
        """All that the next token of each sequence sees is what that text has there; the books agree."""
        for sequence in sequences or self.texts:
            text, keys = self.texts[sequence], self.roots[sequence].keys
            assert sequence.length == len(text)
            for group, (table, window) in enumerate(zip(sequence.tables, self.windows, strict=True)):
                for position in range(visible_offset(len(text), window), len(text)):
                    block, offset = divmod(table.slot(position), SIZE)
                    for number, part in enumerate(("key", "value")):
                        found = int(self.stores[group].contents(part)[block, 0, offset, 0])
                        assert found == number_of(keys, text[: position + 1], 2 * group + number), (group, position)
        self.pool.check_integrity()
        assert not self.pool.swapping._marked
