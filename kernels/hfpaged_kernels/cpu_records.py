"""What a compiled function is told: integers of 64 bits in memory, named by their places, all strides in bytes.

One argument that points to forty numbers costs a call, from Python and between compiled functions alike, far less than
forty arguments. A call describes the query, the caches and the rest; a head is what is read for one KV head of one
sequence and begins like the record of its cache.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from hfpaged_kernels.cpu_bits import load_int32, load_int64, size_of, store_int64

# Of a cache and of a head: where the scales begin in the bytes of a block's head, into how many groups a row is cut,
# and the address of the static scales (of the static scale), or 0.
ADDRESS, KIND, BLOCK_STRIDE, DIM, BLOCK_SIZE, SCALES_AT, GROUPS, STATIC = range(8)
# Of a cache: the residual's address is 0 if it has none.
HEAD_STRIDE, RESIDUAL, RESIDUAL_STRIDE, RESIDUAL_ROW, RESIDUAL_KIND = range(8, 13)
# Of a head: the first position that lies in the residual, and where that is.
OPEN_FROM, OPEN, OPEN_ROW, OPEN_KIND = range(8, 12)
CACHE = 13
# Two cache lines.
HEAD = 16
HEAD_BYTES = 8 * HEAD

# Of a call.
QUERY, QUERY_KIND, QUERY_STRIDE, QUERY_HEAD_STRIDE, KEYS = range(5)
VALUES = KEYS + CACHE
TABLES, TABLE_STRIDE, LENGTHS, RESIDUALS, SINKS, OUT, NUM_SEQS, KV_HEADS, GROUP, WINDOW = range(
    VALUES + CACHE, VALUES + CACHE + 10
)
# Of a call of prefill, where LENGTHS are those of the contexts.
STARTS, QUERY_LENGTHS, NUM_TOKENS = range(WINDOW + 1, WINDOW + 4)

_NOWHERE = 1 << 62


@njit(forceinline=True)
def get(record: int, place: int) -> int:
    return load_int64(record + 8 * place)


@njit(forceinline=True)
def keys_of(call: int) -> int:
    """The record of the keys, as part of a call."""
    return call + 8 * KEYS


@njit(forceinline=True)
def values_of(call: int) -> int:
    return call + 8 * VALUES


@njit(forceinline=True)
def residual_of(call: int, seq: int) -> int:
    """Which residual holds the last, unfilled block of a sequence, or -1."""
    residuals = get(call, RESIDUALS)
    return load_int32(residuals + 4 * seq) if residuals != 0 else -1


@njit(nogil=True)
def describe_head(cache: int, kv_head: int, residual: int, length: int, head: int) -> None:
    """Write the record of one KV head of a sequence of `length` to `head`; `residual` as `residual_of` has it."""
    for place in range(ADDRESS, STATIC):
        store_int64(head + 8 * place, get(cache, place))
    store_int64(head + 8 * ADDRESS, get(cache, ADDRESS) + kv_head * get(cache, HEAD_STRIDE))
    static = get(cache, STATIC)
    store_int64(head + 8 * STATIC, static + 4 * kv_head if static != 0 else 0)
    unfilled = length % get(cache, BLOCK_SIZE)
    is_open = residual >= 0 and get(cache, RESIDUAL) != 0 and unfilled > 0
    store_int64(head + 8 * OPEN_FROM, length - unfilled if is_open else _NOWHERE)
    kind = get(cache, RESIDUAL_KIND)
    row = kv_head * get(cache, DIM) * size_of(kind)
    store_int64(head + 8 * OPEN, get(cache, RESIDUAL) + residual * get(cache, RESIDUAL_STRIDE) + row)
    store_int64(head + 8 * OPEN_ROW, get(cache, RESIDUAL_ROW))
    store_int64(head + 8 * OPEN_KIND, kind)


@njit(forceinline=True)
def block_at(head: int, table: int, index: int) -> Any:
    """The address of one head of the block at `index` of a table."""
    return get(head, ADDRESS) + load_int32(table + 4 * index) * get(head, BLOCK_STRIDE)
