"""The debug mode of a pool: freed blocks are poisoned, and what is off is told with the last transitions of its blocks.

As the red zones and quarantine of AddressSanitizer (Serebryany et al. 2012), for blocks: who reads a block after it was
freed gets NaN, and who writes it is found, because the poison is gone then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hfpaged.block_trace import Holder, TracedBlockManager, TracedBlockPool, Transition
from hfpaged.errors import IntegrityError
from hfpaged.kv_storage import LayerStore
from hfpaged.sequence import Sequence

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool


class PoolDebug:
    """What a pool in debug mode has beside others. Its methods are called under the lock of the pool."""

    def __init__(self, pool: KVPool, blocks: TracedBlockPool, manager: TracedBlockManager) -> None:
        self._pool: KVPool = weakref.proxy(pool)  # which lives as long as its user wants it
        self.blocks, self._manager = blocks, manager
        self._poisoned: weakref.WeakKeyDictionary[LayerStore, set[int]] = weakref.WeakKeyDictionary()
        blocks.on_allocate = self._clear
        manager.names = self._names

    def history(self, block: int) -> tuple[Transition, ...]:
        """The last transitions of a block, the oldest first."""
        return self.blocks.history(block)

    def holders(self, block: int) -> list[Holder]:
        """Whose tables hold a block now."""
        tables = ((each, table) for each in self._manager.sequences for table in each.tables)
        return [self._manager.holder(each) for each, table in tables if block in table.blocks]

    def settle(self) -> None:
        """A change of the pool is over: poison the blocks that are free since then. Cached ones are not."""
        free = self.blocks.take_free()
        for store in self._stores() if free else ():
            poisoned = self._poisoned.setdefault(store, set())
            blocks = [block for block in free if block < store.num_blocks and block not in poisoned]
            if blocks:
                store.poison(blocks)
                poisoned.update(blocks)

    def check_integrity(self) -> None:
        """No free block was written since it was freed. Raises IntegrityError."""
        for store, poisoned in list(self._poisoned.items()):
            written = store.not_poisoned(sorted(poisoned))
            if written:
                raise IntegrityError(f"blocks {written} were written after they were freed", written)

    def told(self, error: IntegrityError) -> IntegrityError:
        """The same error, with the last transitions of the blocks that are off."""
        return self.blocks.told(error)

    def _clear(self, blocks: Iterable[int]) -> None:
        """Blocks are handed out: masked slots of them are read before they are filled, and times zero NaN is NaN."""
        for store, poisoned in list(self._poisoned.items()):
            cleared = [block for block in blocks if block in poisoned]
            if cleared:
                poisoned.difference_update(cleared)  # first: after Ctrl-C in between some are no poison any more
                store.clear(cleared)

    def _stores(self) -> list[LayerStore]:
        return list({id(store): store for each in self._pool.layer_stores.values() for store in each}.values())

    def _names(self) -> Iterator[tuple[Sequence, str]]:
        """Of requests, and of caches the call that they serve. Rows of a batcher's step are named by their requests."""
        for rows in self._pool.live_rows:
            yield from ((sequence, _name_of(rows)) for sequence in rows.sequences)
        for owner, describe in list(self._pool.describers.items()):
            yield from ((owned.sequence, owned.name) for owned in describe(owner))


def _name_of(rows: Any) -> str:
    return "" if rows.is_packed else rows.tokens.origin.name if rows.tokens.origin else "cache"
