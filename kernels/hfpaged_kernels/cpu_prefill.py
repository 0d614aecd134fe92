"""Ragged causal prefill over paged context on CPU.

The query rows that share a KV head (each token has `group` of them) go into tiles of up to 64 rows. As in decode,
all tiles, KV heads and strips lie on one line:

    tile 0 (of sequence 0)     tile 1 (of sequence 0 or 1)   ...
    | head 0 | head 1 | head 2 | head 0 | head 1 | head 2 |

and each thread takes an equal share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from hfpaged_kernels.cpu_bits import (
    LANES,
    VECTOR,
    clear_bytes,
    copy_bytes,
    keep,
    load_int32,
    padded,
    size_of,
    store_one,
)
from hfpaged_kernels.cpu_kept import kept
from hfpaged_kernels.cpu_records import (
    DIM,
    GROUP,
    HEAD_BYTES,
    KV_HEADS,
    LENGTHS,
    NUM_SEQS,
    NUM_TOKENS,
    OUT,
    QUERY,
    QUERY_HEAD_STRIDE,
    QUERY_KIND,
    QUERY_LENGTHS,
    QUERY_STRIDE,
    SINKS,
    STARTS,
    TABLE_STRIDE,
    TABLES,
    WINDOW,
    describe_head,
    get,
    keys_of,
    residual_of,
    values_of,
)
from hfpaged_kernels.cpu_rows import begin_rows, finish_rows, merge_rows, state_bytes, turn_queries
from hfpaged_kernels.cpu_strips import STRIP, strips_between
from hfpaged_kernels.cpu_tiles import attend_strips, strips_bytes

VECTORS = 4
TILE = VECTORS * LANES
_BEGUN, _UNFINISHED = 0, 1
# What a row that belongs to no token sees: nothing.
_NOWHERE = -1.0


@njit(forceinline=True)
def _tile_range(tile_row: int, length: int, context: int, group: int, window: int) -> Any:
    """The first key that a tile can see and the end of its keys."""
    past = context - length
    last_row = min(tile_row + TILE, length * group) - 1
    end = past + last_row // group + 1
    first = max(0, past + tile_row // group - window + 1) if window > 0 else 0
    return first, end


@njit(nogil=True)
def _line(lengths: int, contexts: int, num_seqs: int, group: int, kv_heads: int, window: int) -> Any:
    """For each tile its sequence and first row, and where it begins on the line of strips (and its end)."""
    tiles = 0
    for seq in range(num_seqs):
        tiles += (load_int32(lengths + 4 * seq) * group + TILE - 1) // TILE
    line = np.zeros((tiles + 1, 3), dtype=np.int64)
    tile = 0
    for seq in range(num_seqs):
        length, context = load_int32(lengths + 4 * seq), load_int32(contexts + 4 * seq)
        for row in range(0, length * group, TILE):
            first, end = _tile_range(row, length, context, group, window)
            line[tile, 1], line[tile, 2] = seq, row
            line[tile + 1, 0] = line[tile, 0] + strips_between(first, end) * kv_heads
            tile += 1
    return line


@njit(forceinline=True)
def _of_seq(call: int, place: int, seq: int) -> int:
    """One of the numbers that each sequence has."""
    return load_int32(get(call, place) + 4 * seq)


@njit(nogil=True)
def _lay_out_queries(
    call: int, seq: int, tile_row: int, rows: int, kv_head: int, scale: float, buffer: int, queries: int,
    positions: int,
) -> None:  # fmt: skip
    """The rows of a tile for one KV head, and where each of them is."""
    group, stride, head_stride = get(call, GROUP), get(call, QUERY_STRIDE), get(call, QUERY_HEAD_STRIDE)
    source = get(call, QUERY) + _of_seq(call, STARTS, seq) * stride + kv_head * group * head_stride
    turn_queries(
        source, get(call, QUERY_KIND), stride, head_stride, tile_row, rows, group, get(keys_of(call), DIM), scale,
        buffer, queries,
    )  # fmt: skip
    past = _of_seq(call, LENGTHS, seq) - _of_seq(call, QUERY_LENGTHS, seq)
    for row in range(TILE):
        position = np.float32(past + (tile_row + row) // group) if row < rows else _NOWHERE
        store_one(positions + 4 * row, position)


@njit(nogil=True)
def _attend(
    seq: int, tile_row: int, kv_head: int, first: int, begin: int, stop: int, call: int, scale: float, softcap: float,
    memory: int,
) -> None:  # fmt: skip
    """Strips begin .. stop of one KV head for one tile, the first of which is at `first`, into a new state (at
    `memory`, behind which is room for what `_share` counts).
    """
    group, window, sinks = get(call, GROUP), get(call, WINDOW), get(call, SINKS)
    key_dim, width = get(keys_of(call), DIM), padded(get(values_of(call), DIM))
    state = memory
    queries = state + VECTORS * state_bytes(width)
    strips_buffer = queries + 4 * TILE * key_dim
    positions = strips_buffer + strips_bytes(padded(key_dim), width)
    keys = positions + 4 * TILE
    values = keys + HEAD_BYTES
    length, context = _of_seq(call, QUERY_LENGTHS, seq), _of_seq(call, LENGTHS, seq)
    rows = min(TILE, length * group - tile_row)
    _, end = _tile_range(tile_row, length, context, group, window)
    _lay_out_queries(call, seq, tile_row, rows, kv_head, scale, values + HEAD_BYTES, queries, positions)
    own_sinks = sinks + 4 * kv_head * group if sinks != 0 and begin == 0 else 0
    begin_rows(state, VECTORS, own_sinks, tile_row, group, width)
    describe_head(keys_of(call), kv_head, residual_of(call, seq), context, keys)
    describe_head(values_of(call), kv_head, residual_of(call, seq), context, values)
    attend_strips(
        queries, rows, positions, keys, values, get(call, TABLES) + seq * get(call, TABLE_STRIDE),
        first + begin * STRIP, first + stop * STRIP, end, window, softcap, strips_buffer, state,
    )  # fmt: skip


@njit(nogil=True)
def _share(share: int, shares: int, line: Any, partials: int, owners: Any, call: int, scale: float,
           softcap: float) -> None:  # fmt: skip
    kv_heads, group = get(call, KV_HEADS), get(call, GROUP)
    key_dim, width = get(keys_of(call), DIM), padded(get(values_of(call), DIM))
    row = max(padded(key_dim), width) + 2
    all_states = VECTORS * state_bytes(width)
    floats = TILE * (key_dim + 1) + row + LANES + (2 * HEAD_BYTES + all_states) // 4
    memory = np.empty(floats + strips_bytes(padded(key_dim), width) // 4, dtype=np.float32)
    state = (memory.ctypes.data + VECTOR - 1) // VECTOR * VECTOR
    buffer = state + 4 * (len(memory) - LANES - row)

    tiles = len(line) - 1
    unit, stop_unit = line[tiles, 0] * share // shares, line[tiles, 0] * (share + 1) // shares
    tile = 0
    while unit < stop_unit:
        while line[tile + 1, 0] <= unit:
            tile += 1
        seq, tile_row = line[tile, 1], line[tile, 2]
        length, context = _of_seq(call, QUERY_LENGTHS, seq), _of_seq(call, LENGTHS, seq)
        first, end = _tile_range(tile_row, length, context, group, get(call, WINDOW))
        strips = strips_between(first, end)
        kv_head = (unit - line[tile, 0]) // strips
        begin = unit - line[tile, 0] - kv_head * strips
        stop = min(strips, begin + stop_unit - unit)
        _attend(seq, tile_row, kv_head, first, begin, stop, call, scale, softcap, state)
        if begin == 0 and stop == strips:
            _finish(seq, tile_row, kv_head, call, state, buffer)
        else:
            slot = 2 * share + (_UNFINISHED if begin == 0 else _BEGUN)
            copy_bytes(partials + slot * all_states, state, all_states)
            owners[slot] = tile * kv_heads + kv_head
        unit += stop - begin
    keep(memory)


@njit(nogil=True)
def _finish(seq: int, tile_row: int, kv_head: int, call: int, state: int, buffer: int) -> None:
    """Write the rows of one tile and KV head."""
    kind, kv_heads, group = get(call, QUERY_KIND), get(call, KV_HEADS), get(call, GROUP)
    dim = get(values_of(call), DIM)
    row_bytes = dim * size_of(kind)
    rows = min(TILE, _of_seq(call, QUERY_LENGTHS, seq) * group - tile_row)
    target = get(call, OUT) + (_of_seq(call, STARTS, seq) * kv_heads + kv_head) * group * row_bytes
    token_bytes = kv_heads * group * row_bytes
    finish_rows(state, rows, tile_row, group, padded(dim), dim, buffer, target, kind, token_bytes)


@njit(nogil=True)
def _merge_shares(shares: int, line: Any, partials: int, owners: Any, call: int) -> None:
    """Each head of a tile that was left unfinished takes the parts of the shares that went on with it."""
    kv_heads, width = get(call, KV_HEADS), padded(get(values_of(call), DIM))
    all_states = VECTORS * state_bytes(width)
    buffer = np.empty(width + 2, dtype=np.float32)
    for share in range(shares):
        owner = owners[2 * share + _UNFINISHED]
        if owner < 0:
            continue
        state = partials + (2 * share + _UNFINISHED) * all_states
        later = share + 1
        while later < shares and owners[2 * later + _BEGUN] == owner:
            merge_rows(state, partials + (2 * later + _BEGUN) * all_states, VECTORS, width)
            later += 1
        tile = owner // kv_heads
        _finish(line[tile, 1], line[tile, 2], owner - tile * kv_heads, call, state, buffer.ctypes.data)
    keep(buffer)


@kept(nogil=True, parallel=True)
def prefill(threads: int, call: int, scale: float, softcap: float) -> None:
    """The whole line, in equal shares of which each thread takes one."""
    kv_heads, group, value_dim = get(call, KV_HEADS), get(call, GROUP), get(values_of(call), DIM)
    heads_bytes = kv_heads * group * value_dim * size_of(get(call, QUERY_KIND))
    clear_bytes(get(call, OUT), get(call, NUM_TOKENS) * heads_bytes)
    line = _line(get(call, QUERY_LENGTHS), get(call, LENGTHS), get(call, NUM_SEQS), group, kv_heads, get(call, WINDOW))
    shares = max(1, min(threads, line[len(line) - 1, 0]))
    partials = np.empty(2 * shares * VECTORS * state_bytes(padded(value_dim)) // 4, dtype=np.float32)
    owners = np.full(2 * shares, -1, dtype=np.int64)
    address = partials.ctypes.data
    if shares == 1:
        _share(np.int64(0), np.int64(1), line, address, owners, call, scale, softcap)
    else:
        for share in prange(shares):
            _share(np.int64(share), np.int64(shares), line, address, owners, call, scale, softcap)
        _merge_shares(shares, line, address, owners, call)
    keep(partials)
