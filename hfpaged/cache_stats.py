"""What a pool holds, in numbers for those who report them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """What a pool holds, in blocks, tokens and bytes.

    `bytes_reserved` is what the tensors take; `bytes_live` what tokens fill, shared ones counted once;
    `waste_ratio` the part of the blocks in use that no live token fills. `tokens` is the mean over the layer groups:
    those with a window hold fewer, for a token is gone from them once its block has left the window.

    `blocks_cached` are free and keep a published prefix until they are needed. `prefix_queries` counts the prompt
    tokens that were looked up, once per request, `prefix_hits` those that need not be computed for it,
    `prefix_evictions` the published blocks that had to make room.

    Of a model that `num_ranks` processes compute together this is the pool of number `rank`, with its own heads only.
    """

    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_shared: int
    bytes_reserved: int
    bytes_live: int
    waste_ratio: float
    tokens: int
    blocks_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evictions: int = 0
    rank: int = 0
    num_ranks: int = 1
    blocks_swapped: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    restored_tokens: int = 0
