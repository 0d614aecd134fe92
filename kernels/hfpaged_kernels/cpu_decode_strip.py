"""One strip of one sequence and KV head, folded into the state of its query heads."""

from __future__ import annotations

from numba import njit

from hfpaged_kernels.cpu_bits import LANES, load, padded, store
from hfpaged_kernels.cpu_dequantizing import has_factors
from hfpaged_kernels.cpu_math import multiply
from hfpaged_kernels.cpu_products import add_weighted, score_strip
from hfpaged_kernels.cpu_records import DIM, HEAD_BYTES, get
from hfpaged_kernels.cpu_state import weigh
from hfpaged_kernels.cpu_strips import STRIP, prefetch_strip, read_strip


@njit(nogil=True)
def prefetch_next(heads: int, kv_head: int, kv_heads: int, table: int, position: int, length: int) -> None:
    """The strips of the next KV head, or those of the first one behind them."""
    following, ahead = heads + 2 * HEAD_BYTES, position
    if kv_head + 1 == kv_heads:
        following, ahead = heads - 2 * HEAD_BYTES * kv_head, position + STRIP
    if ahead < length:
        left = min(STRIP, length - ahead)
        prefetch_strip(following, table, ahead, left)
        prefetch_strip(following + HEAD_BYTES, table, ahead, left)


@njit(nogil=True)
def _multiply_parts(weights: int, group: int, factors: int) -> None:
    """Sixteen scores or weights of each query row, by the factors of sixteen rows of the cache."""
    factor = load(factors)
    for g in range(group):
        at = weights + 4 * g * STRIP
        store(at, multiply(load(at), factor))


@njit(nogil=True)
def attend_strip_of_head(
    rows: int, keys: int, values: int, table: int, position: int, count: int, group: int, heads: int, h: int,
    buffer: int, weights: int, state: int, scale: float, softcap: float,
) -> None:  # fmt: skip
    """Fold `count` keys and values of one KV head into the state of its `group` heads, of which `h` is the first."""
    key_width, width = padded(get(keys, DIM)), padded(get(values, DIM))
    factors = weights + 4 * STRIP * group
    for part in range(0, count, LANES):
        own = min(LANES, count - part)
        strip = read_strip(keys, table, position + part, own, buffer, factors)
        score_strip(rows + 4 * h * key_width, strip, key_width, group, weights + 4 * part, 4 * STRIP)
        if has_factors(keys):
            _multiply_parts(weights + 4 * part, group, factors)
    for g in range(group):
        weigh(weights + 4 * g * STRIP, count, state, heads, width, h + g, scale, softcap)
    for part in range(0, count, LANES):
        own = min(LANES, count - part)
        strip = read_strip(values, table, position + part, own, buffer, factors)
        if has_factors(values):
            _multiply_parts(weights + 4 * part, group, factors)
        totals = state + 8 * heads + 4 * h * width
        add_weighted(totals, weights + 4 * part, 4 * STRIP, strip, width, group, own)
