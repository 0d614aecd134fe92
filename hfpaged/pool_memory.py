"""The size of a pool that was given memory, or nothing: a number of blocks, once it is known what one takes."""

from __future__ import annotations

from collections.abc import Mapping
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
        self._shares: dict[torch.device, int] = {}  # bytes of each device, where its user has named nothing

    @property
    def is_named(self) -> bool:
        """Whether its user has named blocks or memory."""
        return self._has_blocks or self._bytes is not None

    def settle(self, pool: KVPool, store: LayerStore) -> None:
        """`store` is new in the pool: turn memory into blocks. A block has a part in all layers, so the device on which
        the fewest of these parts fit decides. Raises InvalidConfigError when nothing fits.
        """
        if self._has_blocks:
            return
        to_come = max(len(group.layers) for group in pool.groups) - pool.storage.num_stores
        sizes = pool.storage.block_bytes_by_device
        sizes[store.key.device] += max(to_come, 0) * store.block_bytes
        if self._bytes is not None:
            fitting = count_blocks(self._bytes, sizes.total(), pool.block_size, len(pool.groups))
        else:
            fitting = self._fewest(sizes, pool)
        pool.blocks.num_blocks = max(fitting, pool.blocks.high_water)
        if self._bytes is None:
            pool.blocks.max_cached = int(pool.blocks.num_blocks * CACHED_SHARE)

    def _fewest(self, sizes: Mapping[torch.device, int], pool: KVPool) -> int:
        """How many blocks fit on each device that takes `sizes` bytes of one, at least."""
        for device in sizes:
            if device not in self._shares:
                self._shares[device] = _default(device, pool.ranks)
        name = str if len(sizes) > 1 else lambda _: ""
        return min(
            count_blocks(self._shares[device], size, pool.block_size, len(pool.groups), name(device))
            for device, size in sizes.items()
        )

    def blocks_worth_of_residuals(self, pool: KVPool) -> int:
        """What residuals take of the memory of a pool that was sized by it."""
        if self._has_blocks or not pool.residuals or not pool.storage.block_bytes:
            return 0
        return -(-pool.residuals.num_open * pool.storage.residual_bytes // pool.storage.block_bytes)
