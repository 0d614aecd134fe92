"""What of a prompt lies below the pool, in host memory, behind what is known of it in the pool."""

from __future__ import annotations

from array import array

from hfpaged.block_table import GONE
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_index import PrefixIndex


def in_host_memory(index: PrefixIndex, root: Root, items: array[int], known: int, limit: int) -> int:
    """How many tokens behind the first `known` of `items`, of at most `limit`, could come back; 0 where a block in
    between is in neither place.
    """
    size = index.block_size * root.width
    parent: PrefixBlock | Root = index.settled(root)
    reach = 0
    for number in range(limit // index.block_size):
        entry = index.child(parent, items[number * size : (number + 1) * size], counted=False)
        if entry is None or not _is_somewhere(index, entry):
            break
        parent, reach = entry, (number + 1) * index.block_size
    return max(reach - known, 0)


def _is_somewhere(index: PrefixIndex, entry: PrefixBlock) -> bool:
    """Whether each layer group of full attention has its block, in the pool or below."""
    below = entry.below or {}
    return all(entry.blocks[group] != GONE or group in below for group in index.whole)
