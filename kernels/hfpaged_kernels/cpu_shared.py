"""The part of decode that rows with a common prefix share: its blocks are read once for all rows.

The query rows of all sequences that share a KV head form one tile, which meets each strip of the common prefix once
(as in Juravsky et al. 2024, "Hydragen", arXiv 2402.05099). What comes out are partial results, from which decode goes
on with each sequence's own blocks. KV heads and strips lie on one line:

    | head 0 | head 1 | head 2 |
    '-- share 0 --'-- share 1 --'

The partial results: [num_kv_heads] states of vectors_of(num_seqs * group) vectors, row seq * group + g.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from hfpaged_kernels.cpu_bits import LANES, VECTOR, keep, load_int32, padded, store_one
from hfpaged_kernels.cpu_kept import kept
from hfpaged_kernels.cpu_records import (
    DIM,
    GROUP,
    HEAD_BYTES,
    KV_HEADS,
    LENGTHS,
    NUM_SEQS,
    QUERY,
    QUERY_HEAD_STRIDE,
    QUERY_KIND,
    QUERY_STRIDE,
    SINKS,
    TABLE_STRIDE,
    TABLES,
    describe_head,
    get,
    keys_of,
    values_of,
)
from hfpaged_kernels.cpu_rows import begin_rows, merge_rows, read_row, state_bytes, turn_queries, vectors_of
from hfpaged_kernels.cpu_strips import STRIP, strips_between
from hfpaged_kernels.cpu_tiles import attend_strips, strips_bytes

# Measured, in units of one query row against one key: what decode pays for a sequence and key besides, what one
# vector of rows and two together cost here, and how many keys the rest (turning rows into lanes and back) is worth.
_SEQUENCE, _ONE_VECTOR, _TWO_VECTORS, _REST = 4, 24, 34, 72
# Waking the threads once more, which costs the same however little there is for each to do.
_WAKING = 5000
# Waking a thread costs as much as this many vectors of rows take for one strip.
_VECTORS_WORTH_A_THREAD = 8


def sharing_pays(num_seqs: int, kv_heads: int, group: int, shared: int, threads: int) -> bool:
    """Whether reading `shared` positions once for all sequences is faster than once for each.

    A few rows leave most lanes idle: with 3 query heads per KV head and one thread 4 sequences must share about 430
    positions, 32 sequences about 60.
    """
    pairs, single = divmod(-(-num_seqs * group // LANES), 2)
    once = (pairs * _TWO_VECTORS + single * _ONE_VECTOR) * (shared + _REST)
    saved = num_seqs * (_SEQUENCE + group) * shared - once
    return shared > 0 and saved * kv_heads > (threads * _WAKING if threads > 1 else 0)


def prefix_floats(num_seqs: int, kv_heads: int, group: int, value_dim: int) -> int:
    """How many float32 the partial results take."""
    return kv_heads * -(-num_seqs * group // LANES) * LANES * (2 + -(-value_dim // LANES) * LANES)


@kept(nogil=True)
def all_go_beyond(lengths: int, num_seqs: int, shared: int) -> bool:
    """Whether the sequences that are not empty, at least one, have tokens of their own behind `shared` positions."""
    for seq in range(num_seqs):
        if 0 < load_int32(lengths + 4 * seq) <= shared:
            return False
    return _first_with_tokens(lengths, num_seqs) < num_seqs


@njit(nogil=True)
def _first_with_tokens(lengths: int, num_seqs: int) -> int:
    """The first sequence that is not empty, num_seqs if none is."""
    for seq in range(num_seqs):
        if load_int32(lengths + 4 * seq) > 0:
            return seq
    return num_seqs


@njit(forceinline=True)
def _head_bytes(num_seqs: int, group: int, width: int) -> int:
    """Of the partial results of one KV head."""
    return vectors_of(num_seqs * group) * state_bytes(width)


@njit(nogil=True)
def take_over(state: int, prefix: int, seq: int, num_seqs: int, kv_heads: int, group: int, width: int) -> None:
    """The partial results of one sequence become a state of decode: maxima, sums, totals of all its heads."""
    heads = kv_heads * group
    for head in range(heads):
        rows = prefix + head // group * _head_bytes(num_seqs, group, width)
        row = seq * group + head % group
        totals = state + 8 * heads + 4 * head * width
        read_row(rows, row, width, state + 4 * head, state + 4 * (heads + head), totals)


@njit(nogil=True)
def _share(share: int, shares: int, shared: int, prefix: int, partials: int, call: int, scale: float,
           softcap: float) -> None:  # fmt: skip
    """One share of the line; a head that an earlier share began goes to `partials`, all others to `prefix`."""
    num_seqs, kv_heads, group, sinks = get(call, NUM_SEQS), get(call, KV_HEADS), get(call, GROUP), get(call, SINKS)
    key_dim, width = get(keys_of(call), DIM), padded(get(values_of(call), DIM))
    key_width = padded(key_dim)
    rows = num_seqs * group
    vectors, strips = vectors_of(rows), strips_between(0, shared)
    floats = vectors * LANES * (key_dim + 1) + key_width + LANES + 2 * HEAD_BYTES // 4
    memory = np.empty(floats + strips_bytes(key_width, width) // 4, dtype=np.float32)
    queries = (memory.ctypes.data + VECTOR - 1) // VECTOR * VECTOR
    strips_buffer = queries + vectors * VECTOR * key_dim
    positions = strips_buffer + strips_bytes(key_width, width)
    keys = positions + vectors * VECTOR
    values = keys + HEAD_BYTES
    buffer = values + HEAD_BYTES
    for row in range(vectors * LANES):
        store_one(positions + 4 * row, np.float32(shared - 1))
    table = get(call, TABLES) + _first_with_tokens(get(call, LENGTHS), num_seqs) * get(call, TABLE_STRIDE)

    unit, end = kv_heads * strips * share // shares, kv_heads * strips * (share + 1) // shares
    while unit < end:
        kv_head = unit // strips
        begin = unit - kv_head * strips
        stop = min(strips, begin + end - unit)
        head_stride = get(call, QUERY_HEAD_STRIDE)
        turn_queries(
            get(call, QUERY) + kv_head * group * head_stride, get(call, QUERY_KIND), get(call, QUERY_STRIDE),
            head_stride, 0, rows, group, key_dim, scale, buffer, queries,
        )  # fmt: skip
        size = _head_bytes(num_seqs, group, width)
        state = prefix + kv_head * size if begin == 0 else partials + share * size
        begin_rows(state, vectors, sinks + 4 * kv_head * group if sinks != 0 and begin == 0 else 0, 0, group, width)
        describe_head(keys_of(call), kv_head, -1, shared, keys)
        describe_head(values_of(call), kv_head, -1, shared, values)
        attend_strips(
            queries, rows, positions, keys, values, table, begin * STRIP, stop * STRIP, shared, 0, softcap,
            strips_buffer, state,
        )  # fmt: skip
        unit += stop - begin
    keep(memory)


@kept(nogil=True, parallel=True)
def attend_prefix(threads: int, shared: int, prefix: int, call: int, scale: float, softcap: float) -> None:
    """Attend for all rows over the first `shared` positions; `prefix` has room for prefix_floats(..) of float32."""
    num_seqs, kv_heads, group = get(call, NUM_SEQS), get(call, KV_HEADS), get(call, GROUP)
    width = padded(get(values_of(call), DIM))
    size, strips = _head_bytes(num_seqs, group, width), strips_between(0, shared)
    units = kv_heads * strips
    shares = max(1, min(threads, units * vectors_of(num_seqs * group) // _VECTORS_WORTH_A_THREAD, units))
    memory = np.empty(shares * size // 4, dtype=np.float32)
    partials = memory.ctypes.data
    if shares == 1:
        _share(np.int64(0), np.int64(1), shared, prefix, partials, call, scale, softcap)
    else:
        for share in prange(shares):
            _share(np.int64(share), np.int64(shares), shared, prefix, partials, call, scale, softcap)
        for share in range(1, shares):
            unit = units * share // shares
            if unit % strips:
                state = prefix + unit // strips * size
                merge_rows(state, partials + share * size, vectors_of(num_seqs * group), width)
    keep(memory)
