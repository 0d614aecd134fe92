"""Who watches the prefix index is told of each published block that comes and goes."""

from __future__ import annotations

from array import array

from hfpaged.block_hash import ExtraKey
from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.prefix_cache import PrefixCache
from hfpaged.token_chain import TokenChain

BLOCK = 4


class Watcher:
    def __init__(self):
        self.told, self.there = [], set()

    def stored(self, entry, group):
        self.told.append(("stored", entry.number, group, entry.blocks[group]))
        self.there.add(entry.blocks[group])

    def removed(self, entry, group, block):
        self.told.append(("removed", entry.number, group, block))
        self.there.remove(block)


def publish(prefixes, manager, tokens):
    sequence = manager.create()
    manager.grow([(sequence, len(tokens))])
    sequence.chain = TokenChain(prefixes.index.root([ExtraKey("model", "m")]), array("q", tokens), [])
    prefixes.publish(sequence)
    manager.free(sequence)


def test_a_watcher_is_told_of_each_block_once_in_order():
    pool = BlockPool(4)
    manager = BlockManager(pool, 1, BLOCK)
    prefixes = PrefixCache(manager, [None])
    watcher = Watcher()
    prefixes.index.watchers.append(watcher)
    publish(prefixes, manager, range(8))
    assert watcher.told == [("stored", 1, 0, 0), ("stored", 2, 0, 1)]
    publish(prefixes, manager, range(8))  # known already
    assert len(watcher.told) == 2
    publish(prefixes, manager, range(100, 112))  # takes what is left, and the end of the first one
    assert [what for what in watcher.told if what[0] == "removed"] == [("removed", 2, 0, 1)]
    assert watcher.there == prefixes.index.held()
    pool.drop_cached()
    assert watcher.there == set() == prefixes.index.held()
