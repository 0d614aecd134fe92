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
from hfpaged_kernels.cpu_rows import begin_rows, finish_rows, merge_rows, state_bytes, turn_queries
from hfpaged_kernels.cpu_strips import CALL, DIM, KEYS, STRIP, TABLES, VALUES, head_of, padded, strips_between
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


@njit(nogil=True)
def _attend(
    line: Any, tile: int, kv_head: int, first: int, begin: int, stop: int, call: Any, scale: float, softcap: float,
    memory: int,
) -> None:  # fmt: skip
    """Strips begin .. stop of one KV head for one tile, the first of which is at `first`, into a new state (at
    `memory`, behind which is room for what `_share` counts).
    """
    query, query_kind, query_stride, query_head_stride = call[:KEYS]
    keys, values = call[KEYS:VALUES], call[VALUES:TABLES]
    tables, table_stride, contexts, residuals, sinks, _, _, _, group, window = call[TABLES:CALL]
    key_dim, width = keys[DIM], padded(values[DIM])
    state = memory
    queries = state + VECTORS * state_bytes(width)
    strips_buffer = queries + 4 * TILE * key_dim
    positions = strips_buffer + strips_bytes(padded(key_dim), width)
    seq, tile_row = line[tile, 1], line[tile, 2]
    start, length = load_int32(call[CALL] + 4 * seq), load_int32(call[CALL + 1] + 4 * seq)
    context = load_int32(contexts + 4 * seq)
    residual = load_int32(residuals + 4 * seq) if residuals != 0 else -1
    rows = min(TILE, length * group - tile_row)
    _, end = _tile_range(tile_row, length, context, group, window)
    turn_queries(
        query + start * query_stride + kv_head * group * query_head_stride, query_kind, query_stride,
        query_head_stride, tile_row, rows, group, key_dim, scale, positions + 4 * TILE, queries,
    )  # fmt: skip
    for row in range(TILE):
        position = np.float32(context - length + (tile_row + row) // group) if row < rows else _NOWHERE
        store_one(positions + 4 * row, position)
    own_sinks = sinks + 4 * kv_head * group if sinks != 0 and begin == 0 else 0
    begin_rows(state, VECTORS, own_sinks, tile_row, group, width)
    attend_strips(
        queries, rows, positions, head_of(keys, kv_head, residual, context),
        head_of(values, kv_head, residual, context), tables + seq * table_stride, first + begin * STRIP,
        first + stop * STRIP, end, window, softcap, strips_buffer, state,
    )  # fmt: skip


@njit(nogil=True)
def _share(share: int, shares: int, line: Any, partials: int, owners: Any, call: Any, scale: float,
           softcap: float) -> None:  # fmt: skip
    contexts, kv_heads, group, window = call[TABLES + 2], call[CALL - 3], call[CALL - 2], call[CALL - 1]
    key_dim, width = call[KEYS + DIM], padded(call[VALUES + DIM])
    all_states = VECTORS * state_bytes(width)
    floats = TILE * (key_dim + 1) + max(padded(key_dim), width) + 2 + LANES
    memory = np.empty(floats + (all_states + strips_bytes(padded(key_dim), width)) // 4, dtype=np.float32)
    state = (memory.ctypes.data + VECTOR - 1) // VECTOR * VECTOR
    buffer = state + 4 * (len(memory) - LANES - max(padded(key_dim), width) - 2)

    tiles = len(line) - 1
    unit, stop_unit = line[tiles, 0] * share // shares, line[tiles, 0] * (share + 1) // shares
    tile = 0
    while unit < stop_unit:
        while line[tile + 1, 0] <= unit:
            tile += 1
        seq, tile_row = line[tile, 1], line[tile, 2]
        length, context = load_int32(call[CALL + 1] + 4 * seq), load_int32(contexts + 4 * seq)
        first, end = _tile_range(tile_row, length, context, group, window)
        strips = strips_between(first, end)
        kv_head = (unit - line[tile, 0]) // strips
        begin = unit - line[tile, 0] - kv_head * strips
        stop = min(strips, begin + stop_unit - unit)
        _attend(line, tile, kv_head, first, begin, stop, call, scale, softcap, state)
        if begin == 0 and stop == strips:
            _finish(line, tile, kv_head, call, state, buffer)
        else:
            slot = 2 * share + (_UNFINISHED if begin == 0 else _BEGUN)
            copy_bytes(partials + slot * all_states, state, all_states)
            owners[slot] = tile * kv_heads + kv_head
        unit += stop - begin
    keep(memory)


@njit(nogil=True)
def _finish(line: Any, tile: int, kv_head: int, call: Any, state: int, buffer: int) -> None:
    """Write the rows of one tile and KV head."""
    query_kind, out, kv_heads, group = call[1], call[TABLES + 5], call[CALL - 3], call[CALL - 2]
    value_dim = call[VALUES + DIM]
    row_bytes = value_dim * size_of(query_kind)
    seq, tile_row = line[tile, 1], line[tile, 2]
    start, length = load_int32(call[CALL] + 4 * seq), load_int32(call[CALL + 1] + 4 * seq)
    finish_rows(
        state, min(TILE, length * group - tile_row), tile_row, group, padded(value_dim), value_dim, buffer,
        out + (start * kv_heads + kv_head) * group * row_bytes, query_kind, kv_heads * group * row_bytes,
    )  # fmt: skip


@njit(nogil=True)
def _merge_shares(shares: int, line: Any, partials: int, owners: Any, call: Any) -> None:
    """Each head of a tile that was left unfinished takes the parts of the shares that went on with it."""
    kv_heads, width = call[CALL - 3], padded(call[VALUES + DIM])
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
        _finish(line, owner // kv_heads, owner % kv_heads, call, state, buffer.ctypes.data)
    keep(buffer)


@njit(cache=True, nogil=True, parallel=True)
def prefill(threads: int, call: Any, scale: float, softcap: float) -> None:
    """The whole line, in equal shares of which each thread takes one.

    Behind the parts that all calls have: the rows where each sequence begins, how many it has, and of all of them.
    """
    _, _, contexts, _, _, out, num_seqs, kv_heads, group, window = call[TABLES:CALL]
    _, lengths, num_tokens = call[CALL:]
    value_dim = call[VALUES + DIM]
    clear_bytes(out, num_tokens * kv_heads * group * value_dim * size_of(call[1]))
    line = _line(lengths, contexts, num_seqs, group, kv_heads, window)
    shares = max(1, min(threads, line[len(line) - 1, 0]))
    partials = np.empty(2 * shares * VECTORS * state_bytes(padded(value_dim)) // 4, dtype=np.float32)
    owners = np.full(2 * shares, -1, dtype=np.int64)
    address = partials.ctypes.data
    if shares == 1:
        _share(0, 1, line, address, owners, call, scale, softcap)
    else:
        for share in prange(shares):
            _share(share, shares, line, address, owners, call, scale, softcap)
        _merge_shares(shares, line, address, owners, call)
    keep(partials)
