"""Ragged causal prefill over paged context on CPU.

The query rows that share a KV head (each token has `group` of them) go into tiles of up to 64 rows, a row per
lane, so that the softmax needs no sum across lanes. As in decode, all tiles, KV heads and strips lie on one line:

    tile 0 (of sequence 0)     tile 1 (of sequence 0 or 1)   ...
    | head 0 | head 1 | head 2 | head 0 | head 1 | head 2 |

and each thread takes an equal share. The state of one head of one tile, float32, all with 16 lanes:
maxima [VECTORS], sums [VECTORS], totals [VECTORS, padded(value_dim)].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from hfpaged_kernels.cpu_bits import (
    FLOAT32,
    LANES,
    NOTHING,
    add,
    clear_bytes,
    convert,
    copy_bytes,
    exp,
    fused,
    keep,
    larger,
    load,
    load_int32,
    load_one,
    multiply,
    size_of,
    splat,
    store,
    store_one,
    subtract,
    tanh,
    where_at_most,
)
from hfpaged_kernels.cpu_strips import STRIP, padded, prefetch_strip, read_strip, strips_between

VECTORS = 4
TILE = VECTORS * LANES
_VECTOR = 4 * LANES
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
def _begin(state: int, sinks: int, tile_row: int, group: int, width: int) -> None:
    """A sink counts as a key that was seen before all others: its logit is the maximum, its weight 1."""
    for row in range(TILE):
        logit = load_one(sinks + 4 * ((tile_row + row) % group)) if sinks != 0 else NOTHING
        store_one(state + 4 * row, logit)
        store_one(state + 4 * (TILE + row), 1.0 if sinks != 0 else 0.0)
    clear_bytes(state + 8 * TILE, 4 * TILE * width)


@njit(nogil=True)
def _turn_queries(
    query: int, kind: int, stride: int, head_stride: int, tile_row: int, rows: int, group: int, dim: int,
    scale: float, buffer: int, target: int,
) -> None:  # fmt: skip
    """Rows of one KV head's queries, scaled, into target[VECTORS, dim, 16]."""
    clear_bytes(target, 4 * TILE * dim)
    for row in range(rows):
        token = (tile_row + row) // group
        source = query + token * stride + (tile_row + row - token * group) * head_stride
        convert(source, kind, buffer, FLOAT32, dim)
        column = target + row // LANES * _VECTOR * dim + row % LANES * 4
        for d in range(dim):
            store_one(column + d * _VECTOR, load_one(buffer + 4 * d) * np.float32(scale))


@njit(nogil=True)
def _score(queries: int, dim: int, keys: int, key_bytes: int, scores: int) -> None:
    """scores[STRIP, 16] of sixteen query rows; eight keys at a time so that sums overlap."""
    for key in range(0, STRIP, 8):
        a = b = c = d = e = f = g = h = splat(0.0)
        row = keys + key * key_bytes
        for column in range(dim):
            q = load(queries + column * _VECTOR)
            at = row + 4 * column
            a = fused(splat(load_one(at)), q, a)
            b = fused(splat(load_one(at + key_bytes)), q, b)
            c = fused(splat(load_one(at + 2 * key_bytes)), q, c)
            d = fused(splat(load_one(at + 3 * key_bytes)), q, d)
            e = fused(splat(load_one(at + 4 * key_bytes)), q, e)
            f = fused(splat(load_one(at + 5 * key_bytes)), q, f)
            g = fused(splat(load_one(at + 6 * key_bytes)), q, g)
            h = fused(splat(load_one(at + 7 * key_bytes)), q, h)
        target = scores + key * _VECTOR
        store(target, a)
        store(target + _VECTOR, b)
        store(target + 2 * _VECTOR, c)
        store(target + 3 * _VECTOR, d)
        store(target + 4 * _VECTOR, e)
        store(target + 5 * _VECTOR, f)
        store(target + 6 * _VECTOR, g)
        store(target + 7 * _VECTOR, h)


@njit(nogil=True)
def _limit(scores: int, softcap: float) -> None:
    cap, inverse = splat(softcap), splat(np.float32(1.0) / np.float32(softcap))
    for key in range(STRIP):
        at = scores + key * _VECTOR
        store(at, multiply(cap, tanh(multiply(load(at), inverse))))


@njit(nogil=True)
def _hide(scores: int, position: int, positions: Any, window: int) -> None:
    """Minus infinity for the keys (from `position` on) that a row does not see."""
    hidden = splat(-np.inf)
    oldest = subtract(positions, splat(np.float32(window - 1)))
    for key in range(STRIP):
        at, here = scores + key * _VECTOR, splat(np.float32(position + key))
        score = where_at_most(here, positions, load(at), hidden)
        if window > 0:
            score = where_at_most(oldest, here, score, hidden)
        store(at, score)


@njit(forceinline=True)
def _weigh(scores: int, maxima: int, sums: int) -> Any:
    """Scores become weights under the new maxima; the result is the factor for what was summed before."""
    old = load(maxima)
    top = old
    for key in range(STRIP):
        top = larger(load(scores + key * _VECTOR), top)
    factor = exp(subtract(old, top))
    added = multiply(load(sums), factor)
    for key in range(STRIP):
        weight = exp(subtract(load(scores + key * _VECTOR), top))
        store(scores + key * _VECTOR, weight)
        added = add(added, weight)
    store(maxima, top)
    store(sums, added)
    return factor


@njit(nogil=True)
def _add_values(totals: int, factor: Any, weights: int, values: int, width: int, count: int) -> None:
    """totals[width, 16] = totals * factor + values[count, width].T @ weights[count, 16], eight columns at a time."""
    for column in range(0, width, 8):
        at = totals + column * _VECTOR
        a, b = multiply(load(at), factor), multiply(load(at + _VECTOR), factor)
        c, d = multiply(load(at + 2 * _VECTOR), factor), multiply(load(at + 3 * _VECTOR), factor)
        e, f = multiply(load(at + 4 * _VECTOR), factor), multiply(load(at + 5 * _VECTOR), factor)
        g, h = multiply(load(at + 6 * _VECTOR), factor), multiply(load(at + 7 * _VECTOR), factor)
        for key in range(count):
            weight, row = load(weights + key * _VECTOR), values + 4 * (key * width + column)
            a = fused(splat(load_one(row)), weight, a)
            b = fused(splat(load_one(row + 4)), weight, b)
            c = fused(splat(load_one(row + 8)), weight, c)
            d = fused(splat(load_one(row + 12)), weight, d)
            e = fused(splat(load_one(row + 16)), weight, e)
            f = fused(splat(load_one(row + 20)), weight, f)
            g = fused(splat(load_one(row + 24)), weight, g)
            h = fused(splat(load_one(row + 28)), weight, h)
        store(at, a)
        store(at + _VECTOR, b)
        store(at + 2 * _VECTOR, c)
        store(at + 3 * _VECTOR, d)
        store(at + 4 * _VECTOR, e)
        store(at + 5 * _VECTOR, f)
        store(at + 6 * _VECTOR, g)
        store(at + 7 * _VECTOR, h)


@njit(nogil=True)
def _merge(state: int, other: int, width: int) -> None:
    """Add the partial result `other` to `state`."""
    for vector in range(VECTORS):
        maxima, sums = vector * _VECTOR, (VECTORS + vector) * _VECTOR
        top = larger(load(state + maxima), load(other + maxima))
        mine, theirs = exp(subtract(load(state + maxima), top)), exp(subtract(load(other + maxima), top))
        store(state + maxima, top)
        store(state + sums, fused(load(state + sums), mine, multiply(load(other + sums), theirs)))
        totals = (2 * VECTORS + vector * width) * _VECTOR
        for at in range(totals, totals + width * _VECTOR, _VECTOR):
            store(state + at, fused(load(state + at), mine, multiply(load(other + at), theirs)))


@njit(nogil=True)
def _finish(
    state: int, rows: int, tile_row: int, group: int, width: int, dim: int, buffer: int, out: int, kind: int,
    token_bytes: int,
) -> None:  # fmt: skip
    """Divide by the sums, turn the lanes back into rows and write them; `out` is the head's first token."""
    for row in range(rows):
        inverse = np.float32(1.0) / load_one(state + 4 * (TILE + row))
        column = state + 8 * TILE + row // LANES * _VECTOR * width + row % LANES * 4
        for d in range(dim):
            store_one(buffer + 4 * d, load_one(column + d * _VECTOR) * inverse)
        token = (tile_row + row) // group
        head = tile_row + row - token * group
        convert(buffer, FLOAT32, out + token * token_bytes + head * dim * size_of(kind), kind, dim)


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
    state_floats = TILE * (2 + width)
    floats = TILE * key_dim + state_floats + STRIP * (key_width + width + LANES) + max(key_width, width) + TILE
    memory = np.empty(floats + LANES, dtype=np.float32)
    queries = (memory.ctypes.data + 63) // 64 * 64
    state = queries + 4 * TILE * key_dim
    key_strip = state + 4 * state_floats
    value_strip = key_strip + 4 * STRIP * key_width
    scores = value_strip + 4 * STRIP * width
    positions = scores + STRIP * _VECTOR
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
        _turn_queries(
            source, query_kind, query_stride, query_head_stride, tile_row, rows, group, key_dim, scale, buffer,
            queries,
        )  # fmt: skip
        for row in range(TILE):
            position = np.float32(context - length + (tile_row + row) // group) if row < rows else _NOWHERE
            store_one(positions + 4 * row, position)
        _begin(state, sinks + 4 * kv_head * group if sinks != 0 and begin == 0 else 0, tile_row, group, width)
        key_base, value_base = keys + kv_head * key_head, values + kv_head * value_head
        for strip in range(begin, stop):
            position = first + strip * STRIP
            count = min(STRIP, end - position)
            if strip + 1 < stop:
                ahead = position + STRIP
                left = min(STRIP, end - ahead)
                prefetch_strip(key_base, kind, key_block, key_dim, block_size, table, ahead, left)
                prefetch_strip(value_base, kind, value_block, value_dim, block_size, table, ahead, left)
            strip_keys = read_strip(
                key_base, kind, key_block, key_dim, block_size, table, position, count, STRIP, key_strip
            )
            strip_values = read_strip(
                value_base, kind, value_block, value_dim, block_size, table, position, count, STRIP, value_strip
            )
            for vector in range((rows + LANES - 1) // LANES):
                lowest = context - length + (tile_row + vector * LANES) // group
                highest = context - length + (tile_row + min(rows, (vector + 1) * LANES) - 1) // group
                if position > highest or (window > 0 and position + STRIP <= lowest - window + 1):
                    continue
                _score(queries + vector * _VECTOR * key_dim, key_dim, strip_keys, 4 * key_width, scores)
                if softcap > 0:
                    _limit(scores, softcap)
                if position + STRIP - 1 > lowest or (window > 0 and position <= highest - window):
                    _hide(scores, position, load(positions + vector * _VECTOR), window)
                factor = _weigh(scores, state + vector * _VECTOR, state + (VECTORS + vector) * _VECTOR)
                totals = state + (2 * VECTORS + vector * width) * _VECTOR
                _add_values(totals, factor, scores, strip_values, width, count)

        if begin == 0 and stop == strips:
            target = out + start * token_bytes + kv_head * group * value_dim * size_of(query_kind)
            _finish(state, rows, tile_row, group, width, value_dim, buffer, target, query_kind, token_bytes)
        else:
            slot = 2 * share + (_UNFINISHED if begin == 0 else _BEGUN)
            copy_bytes(partials + slot * 4 * state_floats, state, 4 * state_floats)
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
    state_bytes = 4 * TILE * (2 + width)
    row_bytes = value_dim * size_of(query_kind)
    buffer = np.empty(width, dtype=np.float32)
    for share in range(shares):
        owner = owners[2 * share + _UNFINISHED]
        if owner < 0:
            continue
        state = partials + (2 * share + _UNFINISHED) * state_bytes
        later = share + 1
        while later < shares and owners[2 * later + _BEGUN] == owner:
            _merge(state, partials + (2 * later + _BEGUN) * state_bytes, width)
            later += 1
        tile = owner // kv_heads
        seq, tile_row, kv_head = line[tile, 1], line[tile, 2], owner - tile * kv_heads
        rows = min(TILE, load_int32(lengths + 4 * seq) * group - tile_row)
        target = out + (load_int32(starts + 4 * seq) * kv_heads + kv_head) * group * row_bytes
        _finish(
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
    partials = np.empty(2 * shares * TILE * (2 + padded(call[23])), dtype=np.float32)
    owners = np.full(2 * shares, -1, dtype=np.int64)
    address = partials.ctypes.data
    if shares == 1:
        _share(0, 1, line, address, owners, call, scale, softcap)
    else:
        for share in prange(shares):
            _share(share, shares, line, address, owners, call, scale, softcap)
        _merge_shares(shares, line, address, owners, call)
    keep(partials)
