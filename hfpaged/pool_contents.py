"""What lies in the blocks of a pool, counted: the lock of the pool is held while tables are copied, and no longer."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hfpaged.block_manager import TableCopy
from hfpaged.block_pool import PoolStats
from hfpaged.cache_stats import CacheStats
from hfpaged.layer_groups import LayerGroup
from hfpaged.prefix_index import PrefixCounts
from hfpaged.ranks import Ranks
from hfpaged.swap_counts import SwapCounts

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool


class GroupContents(NamedTuple):
    """Of one layer group: blocks in use, cached ones, and the tokens in those in use, shared ones counted once."""

    group: LayerGroup
    used: int
    cached: int
    tokens: int


class PoolContents(NamedTuple):
    """A pool at one moment. Bytes: `reserved` by tensors, `live` filled by tokens. `swapped` blocks lie in host memory
    below it.
    """

    blocks: PoolStats
    groups: tuple[GroupContents, ...]
    prefixes: PrefixCounts
    block_size: int
    block_bytes: int
    reserved_bytes: int
    live_bytes: int
    ranks: Ranks | None = None
    swaps: SwapCounts = SwapCounts()
    swapped: int = 0

    @property
    def tokens(self) -> int:
        """Summed over the layer groups."""
        return sum(group.tokens for group in self.groups)

    @property
    def unfilled_slots(self) -> int:
        """Slots of blocks in use that no live token fills."""
        return self.blocks.used * self.block_size - self.tokens

    @property
    def stats(self) -> CacheStats:
        """In short."""
        blocks, counts = self.blocks, self.prefixes
        return CacheStats(
            blocks_total=blocks.total,
            blocks_used=blocks.used,
            blocks_free=blocks.free,
            blocks_shared=blocks.shared,
            bytes_reserved=self.reserved_bytes,
            bytes_live=self.live_bytes,
            waste_ratio=self.unfilled_slots / (blocks.used * self.block_size) if blocks.used else 0.0,
            tokens=self.tokens // max(len(self.groups), 1),
            blocks_cached=blocks.cached,
            prefix_queries=counts.queries,
            prefix_hits=counts.hits,
            prefix_evictions=counts.evictions,
            blocks_swapped=self.swapped,
            swapped_out=self.swaps.blocks_out,
            swapped_in=self.swaps.blocks_in,
            restored_tokens=self.swaps.tokens_in,
            rank=self.ranks.rank if self.ranks else 0,
            num_ranks=self.ranks.size if self.ranks else 1,
        )


def read_pool(pool: KVPool) -> PoolContents:
    """Count what `pool` holds now."""
    with pool.changing() as manager:
        stats, tables = pool.blocks.stats, manager.copy_tables()
        cached = pool.blocks.cached if len(pool.groups) > 1 else []
        size, storage = pool.blocks.high_water, pool.storage
    by_group = pool.prefixes.index.count_by_group(cached) if cached else [stats.cached] * min(len(pool.groups), 1)
    by_group += [0] * (len(pool.groups) - len(by_group))
    counted = [count_tables(copies, pool.block_size, size) for copies in tables]
    groups = tuple(
        GroupContents(group, used, cached, tokens)
        for group, (used, tokens), cached in zip(pool.groups, counted, by_group, strict=True)
    )
    live = sum(_bytes_of(pool, group.group, group.tokens) for group in groups)
    host = pool.swapping.host if pool.swapping else None
    return PoolContents(
        stats, groups, pool.prefixes.index.counts, pool.block_size, storage.block_bytes, storage.nbytes, live,
        pool.ranks, pool.counts.swaps or SwapCounts(), host.num_blocks if host else 0,
    )  # fmt: skip


def count_tables(tables: Many[TableCopy], block_size: int, size: int) -> tuple[int, int]:
    """(blocks that these tables hold, tokens in them), each block once and as full as its fullest holder says. Block
    ids are less than `size`.
    """
    filled = fill_blocks(tables, block_size, size)
    held = filled[filled >= 0]
    return len(held), int(held.sum())


def fill_blocks(tables: Many[TableCopy], block_size: int, size: int) -> npt.NDArray[np.int64]:
    """[size] int64: the tokens in each block by its fullest holder, -1 for one that none of these tables holds."""
    filled = np.full(size, -1)
    tables = [table for table in tables if table.blocks]
    if not tables:
        return filled
    blocks = np.concatenate([np.frombuffer(table.blocks, dtype=np.intc) for table in tables])
    counts = np.array([len(table.blocks) for table in tables])
    behind = np.array([table.length - table.first * block_size for table in tables])  # tokens from the first one on
    place = np.arange(len(blocks)) - np.repeat(counts.cumsum() - counts, counts)
    tokens = np.clip(np.repeat(behind, counts) - place * block_size, 0, block_size)
    np.maximum.at(filled, blocks, tokens)
    return filled


def _bytes_of(pool: KVPool, group: LayerGroup, tokens: int) -> int:
    """What so many tokens of a layer group take."""
    stores = [pool.layer_stores[layer][-1] for layer in group.layers if layer in pool.layer_stores]
    return tokens * sum(store.block_bytes for store in stores) // pool.block_size
