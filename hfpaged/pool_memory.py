"""The size of a pool that was given memory, or nothing: a number of blocks, once it is known what one takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hfpaged.config import parse_bytes
from hfpaged.pool_size import count_blocks, free_memory
from hfpaged.ranks import Ranks, smallest

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool
    from hfpaged.kv_storage import LayerStore

# What a pool may take of the free memory when its user names no size. It grows as needed up to there.
DEFAULT_SHARE = 0.5
# What of such a pool prefixes that nobody uses may keep.
CACHED_SHARE = 0.25


def _default(device: torch.device, ranks: Ranks | None) -> int:
    """The same on all ranks, which look at different moments and, on one host, each at the whole of its memory."""
    free = free_memory(device)
    if ranks is not None and device.type == "cpu":
        free //= ranks.on_host
    return smallest(ranks, int(DEFAULT_SHARE * free))


class PoolMemory:
    """What the user of a pool said of its size: blocks, or `memory` in bytes or as a text, or nothing."""

    def __init__(self, memory: int | str | None, num_blocks: int | None) -> None:
        self._bytes = None if memory is None else parse_bytes(memory)
        self._has_blocks = num_blocks is not None
        self._keeps_all = True  # cached prefixes may fill the pool, which its user has sized

    @property
    def is_named(self) -> bool:
        """Whether its user has named blocks or memory."""
        return self._has_blocks or self._keeps_all

    def settle(self, pool: KVPool, store: LayerStore) -> None:
        """`store` is new in the pool: turn memory into blocks. Raises InvalidConfigError when nothing fits."""
        if self._has_blocks:
            return
        if self._bytes is None:
            self._bytes = _default(store.key.device, pool.ranks)
            self._keeps_all = False
        to_come = max(len(group.layers) for group in pool.groups) - pool.storage.num_stores
        block_bytes = pool.storage.block_bytes + max(to_come, 0) * store.block_bytes
        fitting = count_blocks(self._bytes, block_bytes, pool.block_size, len(pool.groups))
        pool.blocks.num_blocks = max(fitting, pool.blocks.high_water)
        if not self._keeps_all:
            pool.blocks.max_cached = int(pool.blocks.num_blocks * CACHED_SHARE)

    def blocks_worth_of_residuals(self, pool: KVPool) -> int:
        """What residuals take of the memory of a pool that was sized by it."""
        if self._has_blocks or not pool.residuals or not pool.storage.block_bytes:
            return 0
        return -(-pool.residuals.num_open * pool.storage.residual_bytes // pool.storage.block_bytes)
