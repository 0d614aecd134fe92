"""Paged decode on CPU: one query token per sequence.

The strips of all sequences and KV heads lie on one line, which is cut into equal shares, one per thread:

    sequence 0                 sequence 1                    ...
    | head 0 | head 1 | head 2 | head 0 | head 1 | head 2 |
    '--------- share 0 ------------'--------- share 1 -----'

So one long sequence keeps all threads as busy as many short ones. A head that a cut runs through leaves partial
results, which are merged by their maxima and sums (log-sum-exp). Where a prefix was attended over for all sequences
at once (`cpu_shared`), each goes on from what came out of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from hfpaged_kernels.cpu_bits import (
    FLOAT32,
    LANES,
    clear_bytes,
    convert,
    copy_bytes,
    keep,
    load,
    load_int32,
    size_of,
    store,
)
from hfpaged_kernels.cpu_math import multiply
from hfpaged_kernels.cpu_products import add_weighted, score_strip
from hfpaged_kernels.cpu_shared import take_over
from hfpaged_kernels.cpu_state import begin_state, finish, merge, weigh
from hfpaged_kernels.cpu_strips import (
    DIM,
    KEYS,
    LENGTHS,
    STRIP,
    TABLES,
    VALUES,
    has_factors,
    head_of,
    padded,
    prefetch_strip,
    read_strip,
    strips_between,
)

# Waking a thread costs as much as this many strips.
STRIPS_WORTH_A_THREAD = 4
# Two places for partial results per share: the head it found begun, and the head it left unfinished.
_BEGUN, _UNFINISHED = 0, 1


@njit(forceinline=True)
def _first_visible(length: int, window: int) -> int:
    return max(0, length - window) if window > 0 else 0


@njit(forceinline=True)
def _first_own(length: int, window: int, shared: int) -> int:
    """The first position that is left to a sequence itself, behind the prefix that was attended over for all."""
    return max(_first_visible(length, window), shared)


@njit(nogil=True)
def _line(lengths: int, num_seqs: int, window: int, shared: int) -> Any:
    """[num_seqs + 1] where each sequence begins on the line of strips, and where the line ends."""
    starts = np.zeros(num_seqs + 1, dtype=np.int64)
    for seq in range(num_seqs):
        length = load_int32(lengths + 4 * seq)
        strips = strips_between(min(length, _first_own(length, window, shared)), length)
        starts[seq + 1] = starts[seq] + strips
    return starts


@njit(nogil=True)
def _prefetch_next(keys: Any, values: Any, kv_head: int, kv_heads: int, table: int, position: int, length: int) -> None:
    """The strips of the next head, or those of the first head behind them."""
    following, ahead = kv_head + 1, position
    if following == kv_heads:
        following, ahead = 0, position + STRIP
    if ahead < length:
        left = min(STRIP, length - ahead)
        prefetch_strip(head_of(keys, following, -1, length), table, ahead, left)
        prefetch_strip(head_of(values, following, -1, length), table, ahead, left)


@njit(nogil=True)
def _multiply_parts(weights: int, group: int, factors: int) -> None:
    """Sixteen scores or weights of each query row, by the factors of sixteen rows of the cache."""
    factor = load(factors)
    for g in range(group):
        at = weights + 4 * g * STRIP
        store(at, multiply(load(at), factor))


@njit(nogil=True)
def _attend_strip(
    rows: int, keys: Any, values: Any, table: int, position: int, count: int, group: int, heads: int, h: int,
    buffer: int, weights: int, state: int, scale: float, softcap: float,
) -> None:  # fmt: skip
    """Fold `count` keys and values of one KV head into the state of its `group` heads, of which `h` is the first."""
    key_width, width = padded(keys[DIM]), padded(values[DIM])
    factors = weights + 4 * STRIP * group
    for part in range(0, count, LANES):
        own = min(LANES, count - part)
        strip = read_strip(keys, table, position + part, own, LANES, buffer, factors)
        score_strip(rows + 4 * h * key_width, strip, key_width, group, weights + 4 * part, 4 * STRIP)
        if has_factors(keys):
            _multiply_parts(weights + 4 * part, group, factors)
    for g in range(group):
        weigh(weights + 4 * g * STRIP, count, state, heads, width, h + g, scale, softcap)
    for part in range(0, count, LANES):
        own = min(LANES, count - part)
        strip = read_strip(values, table, position + part, own, LANES, buffer, factors)
        if has_factors(values):
            _multiply_parts(weights + 4 * part, group, factors)
        totals = state + 8 * heads + 4 * h * width
        add_weighted(totals, weights + 4 * part, 4 * STRIP, strip, width, group, own)


@njit(nogil=True)
def _attend(
    seq: int, begin: int, stop: int, first: int, prefix: int, call: Any, scale: float, softcap: float, memory: int,
) -> None:  # fmt: skip
    """Strips begin .. stop of one sequence, the first of which is at `first`, into a new state (at `memory`)."""
    query, query_kind, query_stride, query_head_stride = call[:KEYS]
    keys, values = call[KEYS:VALUES], call[VALUES:TABLES]
    tables, table_stride, lengths, residuals, sinks, _, num_seqs, kv_heads, group, _ = call[TABLES:]
    heads, key_width, width = kv_heads * group, padded(keys[DIM]), padded(values[DIM])
    state, rows = memory, memory + 4 * heads * (2 + width)
    buffer = rows + 4 * heads * key_width
    weights = buffer + 4 * LANES * max(key_width, width)
    length, table = load_int32(lengths + 4 * seq), tables + seq * table_stride
    residual = load_int32(residuals + 4 * seq) if residuals != 0 else -1
    for h in range(heads):
        source = query + seq * query_stride + h * query_head_stride
        convert(source, query_kind, rows + 4 * h * key_width, FLOAT32, keys[DIM])
    if begin == 0 and prefix != 0:
        take_over(state, prefix, seq, num_seqs, kv_heads, group, width)
    else:
        begin_state(state, heads, width, sinks if begin == 0 else 0)
    for number in range(begin, stop):
        position = first + number * STRIP
        count = min(STRIP, length - position)
        for kv_head in range(kv_heads):
            _prefetch_next(keys, values, kv_head, kv_heads, table, position, length)
            _attend_strip(
                rows, head_of(keys, kv_head, residual, length), head_of(values, kv_head, residual, length), table,
                position, count, group, heads, kv_head * group, buffer, weights, state, scale, softcap,
            )  # fmt: skip


@njit(nogil=True)
def _share(share: int, shares: int, starts: Any, partials: int, owners: Any, shared: int, prefix: int, call: Any,
           scale: float, softcap: float) -> None:  # fmt: skip
    """Attend over one share of the line. `owners` tells for each partial result whose it is.

    `prefix`, unless 0, holds what came out of the first `shared` positions for all sequences.
    """
    key_width, value_dim = padded(call[KEYS + DIM]), call[VALUES + DIM]
    lengths, _, _, out, num_seqs, kv_heads, group, window = call[LENGTHS:]
    heads, width, kind = kv_heads * group, padded(value_dim), call[1]
    state_bytes = 4 * heads * (2 + width)
    floats = heads * (key_width + 2 + width) + LANES * max(key_width, width) + group * STRIP + 2 * LANES
    memory = np.zeros(floats, dtype=np.float32)
    state = (memory.ctypes.data + 63) // 64 * 64
    unit, end = starts[num_seqs] * share // shares, starts[num_seqs] * (share + 1) // shares
    seq = 0
    while unit < end:
        while starts[seq + 1] <= unit:
            seq += 1
        length = load_int32(lengths + 4 * seq)
        first = _first_own(length, window, shared)
        strips = strips_between(first, length)
        begin = unit - starts[seq]
        stop = min(strips, begin + end - unit)
        _attend(seq, begin, stop, first, prefix, call, scale, softcap, state)
        if begin == 0 and stop == strips:
            finish(state, heads, width, out + seq * heads * value_dim * size_of(kind), kind, value_dim)
        else:
            slot = 2 * share + (_UNFINISHED if begin == 0 else _BEGUN)
            copy_bytes(partials + slot * state_bytes, state, state_bytes)
            owners[slot] = seq
        unit += stop - begin
    keep(memory)


@njit(nogil=True)
def merge_shares(shares: int, partials: int, owners: Any, group: int, dim: int, out: int, out_kind: int) -> None:
    """Each head that was left unfinished takes the parts of the shares that went on with it."""
    width = padded(dim)
    state_bytes = 4 * group * (2 + width)
    for share in range(shares):
        item = owners[2 * share + _UNFINISHED]
        if item < 0:
            continue
        state = partials + (2 * share + _UNFINISHED) * state_bytes
        later = share + 1
        while later < shares and owners[2 * later + _BEGUN] == item:
            merge(state, partials + (2 * later + _BEGUN) * state_bytes, group, width)
            later += 1
        finish(state, group, width, out + item * group * dim * size_of(out_kind), out_kind, dim)


@njit(forceinline=True)
def _clear_empty(lengths: int, num_seqs: int, out: int, row_bytes: int) -> None:
    for seq in range(num_seqs):
        if load_int32(lengths + 4 * seq) <= 0:
            clear_bytes(out + seq * row_bytes, row_bytes)


@njit(cache=True, nogil=True, parallel=True)
def decode(threads: int, shared: int, prefix: int, call: Any, scale: float, softcap: float) -> None:
    """The whole line, in equal shares of which each thread takes one.

    `prefix` is what `attend_prefix` made of the first `shared` positions, or 0 and 0.
    """
    value_dim = call[VALUES + DIM]
    lengths, _, _, out, num_seqs, kv_heads, group, window = call[LENGTHS:]
    heads = kv_heads * group
    starts = _line(lengths, num_seqs, window, shared)
    _clear_empty(lengths, num_seqs, out, heads * value_dim * size_of(call[1]))
    shares = max(1, min(threads, starts[num_seqs] // STRIPS_WORTH_A_THREAD))
    partials = np.empty(2 * shares * heads * (2 + padded(value_dim)), dtype=np.float32)
    owners = np.full(2 * shares, -1, dtype=np.int64)
    address = partials.ctypes.data
    if shares == 1:
        _share(0, 1, starts, address, owners, shared, prefix, call, scale, softcap)
    else:
        for share in prange(shares):
            _share(share, shares, starts, address, owners, shared, prefix, call, scale, softcap)
        merge_shares(shares, address, owners, heads, value_dim, out, call[1])
    keep(partials)
