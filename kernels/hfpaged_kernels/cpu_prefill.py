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

from hfpaged_kernels.cpu_bits import LANES, VECTOR, clear_bytes, copy_bytes, keep, load_int32, size_of, store_one
from hfpaged_kernels.cpu_strips import STRIP, padded, strips_between
from hfpaged_kernels.cpu_tiles import (
    attend_strips,
    begin_rows,
    finish_rows,
    merge_rows,
    state_bytes,
    strips_bytes,
    turn_queries,
)

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


@njit(nogil=True)
def _share(share: int, shares: int, line: Any, partials: int, owners: Any, call: Any, scale: float,
           softcap: float) -> None:  # fmt: skip
    (
        query, query_kind, query_stride, query_head_stride, keys, values, kind, key_block, key_head, value_block,
        value_head, tables, table_stride, contexts, starts, lengths, sinks, out, _, _, kv_heads,
        group, key_dim, value_dim, block_size, window,
    ) = call  # fmt: skip
    key_width, width = padded(key_dim), padded(value_dim)
    token_bytes = kv_heads * group * value_dim * size_of(query_kind)
    all_states = VECTORS * state_bytes(width)
    floats = TILE * (key_dim + 1) + max(key_width, width) + 2 + LANES
    memory = np.empty(floats + (all_states + strips_bytes(key_width, width)) // 4, dtype=np.float32)
    queries = (memory.ctypes.data + VECTOR - 1) // VECTOR * VECTOR
    state = queries + 4 * TILE * key_dim
    strips_buffer = state + all_states
    positions = strips_buffer + strips_bytes(key_width, width)
    buffer = positions + 4 * TILE

    tiles = len(line) - 1
    unit, stop_unit = line[tiles, 0] * share // shares, line[tiles, 0] * (share + 1) // shares
    tile = 0
    while unit < stop_unit:
        while line[tile + 1, 0] <= unit:
            tile += 1
        seq, tile_row = line[tile, 1], line[tile, 2]
        length, context = load_int32(lengths + 4 * seq), load_int32(contexts + 4 * seq)
        start = load_int32(starts + 4 * seq)
        rows = min(TILE, length * group - tile_row)
        first, end = _tile_range(tile_row, length, context, group, window)
        strips = strips_between(first, end)
        kv_head = (unit - line[tile, 0]) // strips
        begin = unit - line[tile, 0] - kv_head * strips
        stop = min(strips, begin + stop_unit - unit)
        table = tables + seq * table_stride
        source = query + start * query_stride + kv_head * group * query_head_stride
        turn_queries(
            source, query_kind, query_stride, query_head_stride, tile_row, rows, group, key_dim, scale, buffer,
            queries,
        )  # fmt: skip
        for row in range(TILE):
            position = np.float32(context - length + (tile_row + row) // group) if row < rows else _NOWHERE
            store_one(positions + 4 * row, position)
        own_sinks = sinks + 4 * kv_head * group if sinks != 0 and begin == 0 else 0
        begin_rows(state, VECTORS, own_sinks, tile_row, group, width)
        attend_strips(
            queries, rows, positions, keys + kv_head * key_head, values + kv_head * value_head, kind, key_block,
            value_block, key_dim, value_dim, block_size, table, first + begin * STRIP, first + stop * STRIP, end,
            window, softcap, strips_buffer, state,
        )  # fmt: skip

        if begin == 0 and stop == strips:
            target = out + start * token_bytes + kv_head * group * value_dim * size_of(query_kind)
            finish_rows(state, rows, tile_row, group, width, value_dim, buffer, target, query_kind, token_bytes)
        else:
            slot = 2 * share + (_UNFINISHED if begin == 0 else _BEGUN)
            copy_bytes(partials + slot * all_states, state, all_states)
            owners[slot] = tile * kv_heads + kv_head
        unit += stop - begin
    keep(memory)


@njit(nogil=True)
def _merge_shares(shares: int, line: Any, partials: int, owners: Any, call: Any) -> None:
    """Each head of a tile that was left unfinished takes the parts of the shares that went on with it."""
    query_kind, starts, lengths, out, kv_heads, group, value_dim = (
        call[1], call[14], call[15], call[17], call[20], call[21], call[23],
    )  # fmt: skip
    width = padded(value_dim)
    all_states = VECTORS * state_bytes(width)
    row_bytes = value_dim * size_of(query_kind)
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
        seq, tile_row, kv_head = line[tile, 1], line[tile, 2], owner - tile * kv_heads
        rows = min(TILE, load_int32(lengths + 4 * seq) * group - tile_row)
        target = out + (load_int32(starts + 4 * seq) * kv_heads + kv_head) * group * row_bytes
        finish_rows(
            state, rows, tile_row, group, width, value_dim, buffer.ctypes.data, target, query_kind,
            kv_heads * group * row_bytes,
        )  # fmt: skip
    keep(buffer)


@njit(cache=True, nogil=True, parallel=True)
def prefill(threads: int, call: Any, scale: float, softcap: float) -> None:
    """The whole line, in equal shares of which each thread takes one."""
    contexts, lengths, num_seqs, kv_heads, group, window = (
        call[13],
        call[15],
        call[18],
        call[20],
        call[21],
        call[25],
    )
    row_bytes = kv_heads * group * call[23] * size_of(call[1])
    clear_bytes(call[17], call[19] * row_bytes)
    line = _line(lengths, contexts, num_seqs, group, kv_heads, window)
    shares = max(1, min(threads, line[len(line) - 1, 0]))
    partials = np.empty(2 * shares * VECTORS * state_bytes(padded(call[23])) // 4, dtype=np.float32)
    owners = np.full(2 * shares, -1, dtype=np.int64)
    address = partials.ctypes.data
    if shares == 1:
        _share(0, 1, line, address, owners, call, scale, softcap)
    else:
        for share in prange(shares):
            _share(share, shares, line, address, owners, call, scale, softcap)
        _merge_shares(shares, line, address, owners, call)
    keep(partials)
