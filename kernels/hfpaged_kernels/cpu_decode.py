"""Paged decode on CPU: one query token per sequence.

The strips of all sequences and KV heads lie on one line, which is cut into equal shares, one per thread:

    sequence 0                 sequence 1                    ...
    | head 0 | head 1 | head 2 | head 0 | head 1 | head 2 |
    '--------- share 0 ------------'--------- share 1 -----'

So one long sequence keeps all threads as busy as many short ones. A head that a cut runs through leaves partial
results, which are merged by their maxima and sums (log-sum-exp). Where a prefix was attended over for all sequences
at once (`cpu_shared`), each goes on from what came out of that.

The state of one head of one sequence, float32: maxima [group], sums [group], totals [group, padded(value_dim)].
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
    keep,
    lane_numbers,
    larger,
    largest,
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
    total,
    where_at_most,
)
from hfpaged_kernels.cpu_shared import take_over
from hfpaged_kernels.cpu_strips import (
    STRIP,
    add_weighted,
    padded,
    prefetch_strip,
    read_strip,
    score_strip,
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
def _begin(state: int, group: int, width: int, sinks: int) -> None:
    """A sink counts as a key that was seen before all others: its logit is the maximum, its weight 1."""
    for g in range(group):
        store_one(state + 4 * g, load_one(sinks + 4 * g) if sinks != 0 else NOTHING)
        store_one(state + 4 * (group + g), 1.0 if sinks != 0 else 0.0)
    clear_bytes(state + 8 * group, 4 * group * width)


@njit(forceinline=True)
def _scale_row(row: int, width: int, factor: Any) -> None:
    for column in range(0, 4 * width, 4 * LANES):
        store(row + column, multiply(load(row + column), factor))


@njit(forceinline=True)
def _raise_maximum(state: int, group: int, width: int, g: int, top: float) -> None:
    """What was summed under the old maximum is brought under the new one."""
    factor = exp(splat(load_one(state + 4 * g) - top))
    _scale_row(state + 8 * group + 4 * g * width, width, factor)
    sums = state + 4 * (group + g)
    store_one(sums, total(multiply(splat(load_one(sums)), factor)) / LANES)
    store_one(state + 4 * g, top)


@njit(nogil=True)
def _merge(state: int, other: int, group: int, width: int) -> None:
    """Add the partial result `other` to `state`; `other` is used up."""
    for g in range(group):
        top = max(load_one(state + 4 * g), load_one(other + 4 * g))
        _raise_maximum(state, group, width, g, top)
        _raise_maximum(other, group, width, g, top)
        sums = state + 4 * (group + g)
        store_one(sums, load_one(sums) + load_one(other + 4 * (group + g)))
        row, added = state + 8 * group + 4 * g * width, other + 8 * group + 4 * g * width
        for column in range(width):
            store_one(row + 4 * column, load_one(row + 4 * column) + load_one(added + 4 * column))


@njit(nogil=True)
def _finish(state: int, group: int, width: int, out: int, out_kind: int, dim: int) -> None:
    """Divide by the sums and write the heads of the group, which lie one after the other in `out`."""
    for g in range(group):
        row = state + 8 * group + 4 * g * width
        _scale_row(row, width, splat(np.float32(1.0) / load_one(state + 4 * (group + g))))
        convert(row, FLOAT32, out + g * dim * size_of(out_kind), out_kind, dim)


@njit(nogil=True)
def _weigh(weights: int, count: int, state: int, heads: int, width: int, h: int, scale: float, softcap: float) -> None:
    """Turn the products of one head with a strip of keys into weights, under the maximum so far."""
    top = splat(-np.inf)
    for part in range(0, STRIP, LANES):
        scores = multiply(load(weights + 4 * part), splat(scale))
        if softcap > 0:
            scores = multiply(splat(softcap), tanh(multiply(scores, splat(np.float32(1.0) / softcap))))
        if count < STRIP:
            scores = where_at_most(lane_numbers(), splat(np.float32(count - 1 - part)), scores, splat(-np.inf))
        store(weights + 4 * part, scores)
        top = larger(top, scores)
    highest = largest(top)
    if highest > load_one(state + 4 * h):
        _raise_maximum(state, heads, width, h, highest)
    maximum = splat(load_one(state + 4 * h))
    added = splat(0.0)
    for part in range(0, STRIP, LANES):
        weight = exp(subtract(load(weights + 4 * part), maximum))
        store(weights + 4 * part, weight)
        added = add(added, weight)
    sums = state + 4 * (heads + h)
    store_one(sums, load_one(sums) + total(added))


@njit(nogil=True)
def decode_share(share: int, shares: int, starts: Any, partials: int, owners: Any, shared: int, prefix: int, call: Any,
                 scale: float, softcap: float) -> None:  # fmt: skip
    """Attend over one share of the line. `owners` tells for each partial result whose it is.

    `prefix`, unless 0, holds what came out of the first `shared` positions for all sequences.
    """
    (
        query, query_kind, query_stride, query_head_stride, keys, values, kind, key_block, key_head, value_block,
        value_head, tables, table_stride, lengths, sinks, out, num_seqs, kv_heads, group, key_dim, value_dim,
        block_size, window,
    ) = call  # fmt: skip
    key_width, width = padded(key_dim), padded(value_dim)
    heads = kv_heads * group
    state_bytes = 4 * heads * (2 + width)
    floats = heads * (key_width + 2 + width) + LANES * max(key_width, width) + group * STRIP + LANES
    memory = np.empty(floats, dtype=np.float32)
    buffer = (memory.ctypes.data + 63) // 64 * 64
    weights = buffer + 4 * LANES * max(key_width, width)
    rows = weights + 4 * STRIP * group
    state = rows + 4 * heads * key_width
    clear_bytes(rows, 4 * heads * key_width)

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
        table = tables + seq * table_stride
        for h in range(heads):
            source = query + seq * query_stride + h * query_head_stride
            convert(source, query_kind, rows + 4 * h * key_width, FLOAT32, key_dim)
        if begin == 0 and prefix != 0:
            take_over(state, prefix, seq, num_seqs, kv_heads, group, width)
        else:
            _begin(state, heads, width, sinks if begin == 0 else 0)
        for number in range(begin, stop):
            position = first + number * STRIP
            count = min(STRIP, length - position)
            for kv_head in range(kv_heads):
                following, ahead = kv_head + 1, position
                if following == kv_heads:
                    following, ahead = 0, position + STRIP
                if ahead < length:
                    left = min(STRIP, length - ahead)
                    prefetch_strip(
                        keys + following * key_head, kind, key_block, key_dim, block_size, table, ahead, left
                    )
                    prefetch_strip(
                        values + following * value_head,
                        kind,
                        value_block,
                        value_dim,
                        block_size,
                        table,
                        ahead,
                        left,
                    )
                h = kv_head * group
                for part in range(0, count, LANES):
                    strip = read_strip(
                        keys + kv_head * key_head, kind, key_block, key_dim, block_size, table, position + part,
                        min(LANES, count - part), LANES, buffer,
                    )  # fmt: skip
                    score_strip(rows + 4 * h * key_width, strip, key_width, group, weights + 4 * part, 4 * STRIP)
                for g in range(group):
                    _weigh(weights + 4 * g * STRIP, count, state, heads, width, h + g, scale, softcap)
                for part in range(0, count, LANES):
                    strip = read_strip(
                        values + kv_head * value_head, kind, value_block, value_dim, block_size, table,
                        position + part, min(LANES, count - part), LANES, buffer,
                    )  # fmt: skip
                    add_weighted(
                        state + 8 * heads + 4 * h * width, weights + 4 * part, 4 * STRIP, strip, width, group,
                        min(LANES, count - part),
                    )  # fmt: skip

        if begin == 0 and stop == strips:
            _finish(
                state,
                heads,
                width,
                out + seq * heads * value_dim * size_of(query_kind),
                query_kind,
                value_dim,
            )
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
            _merge(state, partials + (2 * later + _BEGUN) * state_bytes, group, width)
            later += 1
        _finish(state, group, width, out + item * group * dim * size_of(out_kind), out_kind, dim)


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
    lengths, out, num_seqs, kv_heads, group, value_dim, window = (
        call[13], call[15], call[16], call[17], call[18], call[20], call[22],
    )  # fmt: skip
    heads = kv_heads * group
    starts = _line(lengths, num_seqs, window, shared)
    _clear_empty(lengths, num_seqs, out, heads * value_dim * size_of(call[1]))
    shares = max(1, min(threads, starts[num_seqs] // STRIPS_WORTH_A_THREAD))
    partials = np.empty(2 * shares * heads * (2 + padded(value_dim)), dtype=np.float32)
    owners = np.full(2 * shares, -1, dtype=np.int64)
    address = partials.ctypes.data
    if shares == 1:
        decode_share(0, 1, starts, address, owners, shared, prefix, call, scale, softcap)
    else:
        for share in prange(shares):
            decode_share(share, shares, starts, address, owners, shared, prefix, call, scale, softcap)
        merge_shares(shares, address, owners, heads, value_dim, out, call[1])
    keep(partials)
