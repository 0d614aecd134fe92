"""transformers' cache with its keys and values in blocks, and what it does to whole rows: tables in place of copies."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hfpaged import compat
from hfpaged.cache_stats import CacheStats
from hfpaged.kv_pool import KVPool
from hfpaged.memory_account import MemoryAccount
from hfpaged.memory_map import MemoryMap
from hfpaged.paged_layer import PagedLayer
from hfpaged.prefix_block import Origin
from hfpaged.rows import Rows
from hfpaged.state_layer import paged_layer


class RowCache(DynamicCache):
    """Paged layers over rows that they share, and transformers' own layers beside them."""

    def _adopt(self, rows: Rows, layers: list[Any]) -> None:
        """Put paged layers in the places of the pageable ones; the others stay transformers' own."""
        for group_index, group in enumerate(rows.pool.groups):
            for place, index in enumerate(group.layers):
                layers[index] = paged_layer(rows, group_index, place, layers[index])
        Cache.__init__(self, layers=layers)
        self._rows = rows
        # Layers hold the rows, not the cache, so that a dropped cache dies at once and its blocks come back.
        self._finalizer = weakref.finalize(self, rows.abandon)

    def _share_stores(self, other: RowCache) -> None:
        """Read and write where the layers of `other`, which is on the same pool, do."""
        for new, old in zip(self.layers, other.layers, strict=True):
            if isinstance(new, PagedLayer):
                new.share_store(old)

    @property
    def pool(self) -> KVPool:
        """The block pool, to share with other caches of this model."""
        return self._rows.pool

    def memory_map(self) -> MemoryMap:
        """Which sequence holds which block of the pool now, the rows of this cache first: to print, or to `plot()`."""
        return self.pool.memory_map(self._rows)

    @property
    def stored_tokens(self) -> int:
        """Of all rows, padding not counted."""
        return sum(sequence.length for sequence in self._rows.sequences)

    def computed_by(self, origin: Origin) -> None:
        """What is computed from now on stands for this one."""
        self._rows.tokens.origin = origin

    def look_at_memory(self, account: MemoryAccount) -> None:
        """Let somebody note what the rows hold now."""
        with self.pool.changing():
            account.look(self.pool.blocks, self._rows.sequences)

    def stats(self) -> CacheStats:
        """What the pool of this cache holds now, all caches on it together."""
        return self.pool.stats()

    @property
    def _own_layers(self) -> list[Any]:
        return [own for layer in self.layers if (own := own_part(layer)) is not None]

    def free(self) -> None:
        """Give all blocks back. The cache is empty and can be used again."""
        self._rows.free()
        for layer in self._own_layers:
            layer.reset()

    reset = free

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: tables are forked, nothing is copied."""
        self._select(beam_idx)
        for layer in self._own_layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` (numbers, or a bool mask over the rows)."""
        self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)
        for layer in self._own_layers:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side; the blocks are shared."""
        self._rows.select([row for row in range(self._rows.batch) for _ in range(repeats)])
        for layer in self._own_layers:
            layer.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` positions of each row, at most all. What `activate_past_recording` held
        back is let go, by crop(0) too.

        Raises ValueError for a positive number, as transformers does (before 5.18: the length to keep), and
        WindowPassedError where layers with a window do not hold any more what the next token would see.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding before 5.18 gives a tensor
        length = self._rows.length + tokens_to_remove
        if tokens_to_remove > 0:
            if not compat.positive_crop_is_length():
                raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
            length = tokens_to_remove
        if tokens_to_remove:
            self._rows.truncate(max(length, 0))
        self._rows.release_left(recorded=True)
        for layer in self._own_layers:
            layer.crop(tokens_to_remove)

    def _select(self, indices: Tensor) -> None:
        if self._rows.length:
            self._rows.select(indices.tolist())


def own_part(layer: Any) -> Any | None:
    """What of a layer is transformers' own: all of it, the state beside paged keys and values, or nothing."""
    return layer.own if isinstance(layer, PagedLayer) else layer
