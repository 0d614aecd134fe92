"""What all ranks of a model know of the same prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many

from hfpaged.kv_pool import KVPool
from hfpaged.prefix_block import Root
from hfpaged.prefix_index import Match
from hfpaged.ranks import ranges


def on_all_ranks(pool: KVPool, root: Root, items: Many[array[int]], matches: list[Match]) -> list[Match]:
    """As much of these matches of `items` as every rank knows, where there are several: else one would compute what
    another does not, and both would wait. Nothing but the moment in which garbage is collected should make them differ.
    """
    while True:
        found = ranges(pool.ranks, [match.length(pool.block_size) for match in matches])
        if all(low == high for low, high in found):
            return matches
        matches = [pool.prefixes.longest(root, row, low) for row, (low, _) in zip(items, found, strict=True)]
