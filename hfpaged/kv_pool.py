"""The pool that caches share: block ids, sequences and the tensors behind them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from hfpaged import live_pools
from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.block_trace import TracedBlockManager, TracedBlockPool
from hfpaged.cache_stats import CacheStats
from hfpaged.config import check_block_size, check_size, wants_debug
from hfpaged.content import one_prompt
from hfpaged.errors import IntegrityError
from hfpaged.explain import Decoder, explain_prompt
from hfpaged.kv_format import KVFormat, check_layers
from hfpaged.kv_storage import KVStorage, LayerStore, PartScales
from hfpaged.layer_groups import LayerGroup
from hfpaged.memory_map import MemoryMap
from hfpaged.memory_owners import Describe, LiveRows, map_memory
from hfpaged.pool_change import PoolChange
from hfpaged.pool_contents import read_pool
from hfpaged.pool_debug import PoolDebug
from hfpaged.pool_memory import PoolMemory
from hfpaged.pool_size import check_swap_space
from hfpaged.prefix_cache import PrefixCache, is_for
from hfpaged.prefix_loading import LoadedPrefixes, load_prefixes
from hfpaged.prefix_report import PrefixReport
from hfpaged.prefix_saving import SavedPrefixes, save_prefixes
from hfpaged.ranks import Ranks
from hfpaged.residuals import Residuals
from hfpaged.swapping import tiers_below
from hfpaged.tier import Tier


class KVPool:
    """Blocks for the layers of one model. Its size is `num_blocks`, or what fits into `memory` (bytes or a text
    such as "2GiB"), known when the first key has come; by default half of the memory that is free then. With `debug`
    (None: as HFPAGED_DEBUG=1 says) freed blocks are poisoned with NaN and errors tell the last changes of their blocks.
    Evicted prefixes go to `swap_space` of host memory, from which they come back when that is cheaper than computing.
    """

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        *,
        block_size: int,
        kv_format: KVFormat,
        memory: int | str | None = None,
        num_blocks: int | None = None,
        scales: Mapping[int, PartScales] | None = None,
        debug: bool | None = None,
        swap_space: int | str = 0,
    ) -> None:
        check_layers(kv_format, (layer for group in groups for layer in group.layers))
        size, swap_size = check_size(memory, num_blocks, len(groups)), check_swap_space(swap_space)
        self.groups, self.kv_format = groups, kv_format
        self.block_size = check_block_size(block_size)
        self.storage = KVStorage(block_size, kv_format, scales)
        self.residuals = Residuals() if any(each.has_residuals for each in kv_format.all) else None
        self._memory = PoolMemory(memory, num_blocks)
        self.layer_stores: dict[int, list[LayerStore]] = {}  # by layer, one for each kind of key
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose caches use it
        self.debug: PoolDebug | None = None
        windows = [group.window for group in groups]
        self._make_blocks(size, windows, wants_debug(debug))
        self.change = PoolChange(self.manager, self.debug.settle if self.debug else None)
        if self.residuals is not None:
            self.blocks.on_free = self.residuals.close
            self.blocks.reserved = lambda: self._memory.blocks_worth_of_residuals(self)
        self.prefixes = PrefixCache(self.manager, windows)
        self.is_of_several_ranks = False  # one batcher stores in it, with other processes
        self.live_rows = LiveRows()  # those of all caches on this pool
        self.describers: weakref.WeakKeyDictionary[Any, Describe] = weakref.WeakKeyDictionary()  # others' sequences
        self.counts = live_pools.register(self)
        self.ranks: Ranks | None = None  # of a model that several processes compute together
        self.swapping = tiers_below(self, swap_size) if swap_size else None

    @property
    def num_blocks(self) -> int:
        """Blocks in all; 0 while a pool sized by memory has not seen a key."""
        return self.blocks.num_blocks

    @property
    def is_sized_by_user(self) -> bool:
        """Whether its user has named blocks or memory; else it is as large as the free memory lets it be."""
        return self._memory.is_named

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, those of cached prefixes among them."""
        self.change.try_reclaim()
        return self.blocks.num_free

    def changing(self) -> AbstractContextManager[BlockManager]:
        """The block manager, for one thread at a time."""
        return self.change()

    def add_model(self, model: Any, name: str) -> None:
        """A cache of `model` uses this pool."""
        with self.change.lock:
            self.models.add(model)
            self.counts.model_name = self.counts.model_name or name

    def user_models(self) -> list[Any]:
        """Those whose caches use it, and are still there."""
        with self.change.lock:
            return list(self.models)

    def settle_idle(self) -> None:
        """Publish what caches hold that are between two forwards: a chat goes on while its last answer is kept."""
        with self.changing() as manager:
            for rows in self.live_rows:
                rows.settle_idle(manager)

    def abandon(self, free: Callable[[BlockManager], None]) -> None:
        """Free the sequences of a cache that is gone. The garbage collector calls this in the middle of anything, a
        change of this very pool included: where that is under way, the blocks come back at the next one.
        """
        self.change.abandon(free)

    def pin_prefix(self, input_ids: Any, salt: str | None = None, adapter: str | None = None) -> int:
        """Keep what is known of a prompt [length] from eviction; how many tokens that are, 0 where nothing is known.

        What is known under this salt and this adapter last is kept, where models or weights have changed.
        """
        items = one_prompt(input_ids)
        with self.changing():
            root = self.prefixes.last_root(salt, adapter)
            return self.prefixes.pin(root, items) if root else 0

    def unpin_prefix(self, input_ids: Any, salt: str | None = None, adapter: str | None = None) -> bool:
        """Undo `pin_prefix`; whether the prompt was pinned."""
        items = one_prompt(input_ids)
        with self.changing():
            pinned = [root for root in self.prefixes.pinned(items) if is_for(root, salt, adapter)]
            for root in pinned:
                self.prefixes.unpin(root, items)
        return bool(pinned)

    def drop_prefixes(self) -> int:
        """Forget the prefixes that nobody holds; how many blocks they had. Pinned ones and those in use stay."""
        with self.changing():
            return self.forget_cached()

    def forget_cached(self) -> int:
        """`drop_prefixes` in the middle of a change."""
        return self.swapping.forgetting(self.blocks.drop_cached) if self.swapping else self.blocks.drop_cached()

    def add_tier(self, tier: Tier) -> None:
        """Let what is evicted, or leaves `swap_space`, go to `tier`. Raises InvalidConfigError where one is there."""
        with self.changing():
            self.swapping = self.swapping or tiers_below(self, 0)
            self.swapping.add(tier)

    def __repr__(self) -> str:
        used = f"{self.blocks.num_used} of {self.num_blocks} blocks of {self.block_size} tokens used"
        return f"KVPool({used}, {self.ranks})" if self.ranks else f"KVPool({used})"

    def stats(self) -> CacheStats:
        """A snapshot. `tokens` counts a token that several sequences share once."""
        return read_pool(self).stats

    def memory_map(self, asking: Any = None) -> MemoryMap:
        """Which sequence holds which block now, those of `asking`, if it has any, first: to print, or to `plot()`."""
        return map_memory(self, asking)

    def explain(
        self, input_ids: Any, tokenizer: Decoder | None = None, salt: str | None = None, adapter: str | None = None
    ) -> PrefixReport:
        """How much of a prompt is known now, and why no more; changes nothing.

        Args:
            input_ids: one prompt without padding: a list, or a tensor [length] or [1, length].
            tokenizer: to show texts, not token ids; anything that has `decode`.
            salt, adapter: of the cache and model that the prompt would be for. All else (weights, dtype) is taken to
                be as in the forward that looked for a prefix last.

        Raises InvalidConfigError for several prompts.
        """
        ids = one_prompt(input_ids)
        with self.changing():
            facts = explain_prompt(self.prefixes.index, ids, salt, adapter)
        return facts.with_texts(tokenizer)

    def save_prefixes(self, path: str | os.PathLike[str]) -> SavedPrefixes:
        """Write all published blocks into one safetensors file, for `load_prefixes` in this process or another one.

        It holds token ids in clear, so only its owner can read it; salts stand in it as hashes. Other threads wait.

        Raises PrefixFileError for a pool that holds a layer in two kinds, OSError where the file cannot be written.
        """
        return save_prefixes(self, path)

    def load_prefixes(self, path: str | os.PathLike[str]) -> LoadedPrefixes:
        """Publish the blocks of a saved file, as many as fit beside what the pool holds, the last used ones first.

        Raises PrefixFileError and changes nothing for a file that was truncated or changed, or is of another model,
        rank, block size, KV format or layer groups, and OSError where it cannot be read.
        """
        return load_prefixes(self, path)

    def check_integrity(self) -> None:
        """Recount all blocks from scratch. Raises IntegrityError."""
        with self.changing():
            try:
                self._check_integrity()
            except IntegrityError as error:
                raise (self.debug.told(error) if self.debug else error) from None

    def _check_integrity(self) -> None:
        for part in (self.manager, self.prefixes, self.swapping, self.debug):
            if part:
                part.check_integrity()
        if self.residuals is not None:
            self.residuals.check_integrity(self.blocks.refcount)

    def reserve_all(self) -> None:
        """Take the memory of all blocks now, so that no step waits while what is stored is copied to a larger place.
        Raises RuntimeError where the device has not so much.
        """
        for store in [each for stores in self.layer_stores.values() for each in stores]:
            store.reserve(self.num_blocks, self.num_blocks)
        if self.swapping:
            self.swapping.reserve()

    def settle_size(self, layer: int, store: LayerStore) -> None:
        """Layer `layer` keeps its blocks in `store`: turn memory into a number of blocks by what is known now.

        Layers that have not come yet count like this one. Raises InvalidConfigError when nothing fits.
        """
        with self.change.lock:
            known = self.layer_stores.setdefault(layer, [])
            known[:] = [other for other in known if other is not store] + [store]
            self._memory.settle(self, store)
            if self.swapping:
                self.swapping.check_size(self.storage.block_bytes)

    def _make_blocks(self, size: int, windows: list[int | None], debug: bool) -> None:
        if not debug:
            self.blocks = BlockPool(size)
            self.manager = BlockManager(self.blocks, len(windows), self.block_size, windows)
            return
        self.blocks = blocks = TracedBlockPool(size)
        self.manager = manager = TracedBlockManager(blocks, len(windows), self.block_size, windows)
        self.debug = PoolDebug(self, blocks, manager)
