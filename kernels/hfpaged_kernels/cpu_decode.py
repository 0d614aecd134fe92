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
    VECTOR,
    clear_bytes,
    convert,
    copy_bytes,
    keep,
    load_int32,
    padded,
    size_of,
)
from hfpaged_kernels.cpu_decode_strip import attend_strip_of_head, prefetch_next
from hfpaged_kernels.cpu_kept import kept
from hfpaged_kernels.cpu_records import (
    DIM,
    GROUP,
    HEAD_BYTES,
    KV_HEADS,
    LENGTHS,
    NUM_SEQS,
    OUT,
    QUERY,
    QUERY_HEAD_STRIDE,
    QUERY_KIND,
    QUERY_STRIDE,
    SINKS,
    TABLE_STRIDE,
    TABLES,
    WINDOW,
    describe_head,
    get,
    keys_of,
    residual_of,
    values_of,
)
from hfpaged_kernels.cpu_shared import take_over
from hfpaged_kernels.cpu_state import begin_state, finish, merge
from hfpaged_kernels.cpu_strips import STRIP, strips_between

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
def _read_queries(call: int, seq: int, heads: int, rows: int) -> None:
    kind, dim = get(call, QUERY_KIND), get(keys_of(call), DIM)
    source, stride = get(call, QUERY) + seq * get(call, QUERY_STRIDE), get(call, QUERY_HEAD_STRIDE)
    for h in range(heads):
        convert(source + h * stride, kind, rows + 4 * h * padded(dim), FLOAT32, dim)


@njit(nogil=True)
def _attend(
    seq: int, begin: int, stop: int, first: int, prefix: int, call: int, scale: float, softcap: float, memory: int,
    state: int,
) -> None:  # fmt: skip
    """Strips begin .. stop of one sequence, the first of which is at `first`, into a new state.

    `memory` has room for a strip, for weights and factors of its rows, for the queries and the records of all heads;
    each begins at a cache line.
    """
    kv_heads, group = get(call, KV_HEADS), get(call, GROUP)
    keys, values = keys_of(call), values_of(call)
    heads, key_width, width = kv_heads * group, padded(get(keys, DIM)), padded(get(values, DIM))
    weights = memory + 4 * LANES * max(key_width, width)
    rows = weights + 4 * (group * STRIP + LANES)
    records = rows + 4 * heads * key_width
    length, table = load_int32(get(call, LENGTHS) + 4 * seq), get(call, TABLES) + seq * get(call, TABLE_STRIDE)
    for kv_head in range(kv_heads):
        record = records + 2 * HEAD_BYTES * kv_head
        describe_head(keys, kv_head, residual_of(call, seq), length, record)
        describe_head(values, kv_head, residual_of(call, seq), length, record + HEAD_BYTES)
    _read_queries(call, seq, heads, rows)
    if begin == 0 and prefix != 0:
        take_over(state, prefix, seq, get(call, NUM_SEQS), kv_heads, group, width)
    else:
        begin_state(state, heads, width, get(call, SINKS) if begin == 0 else 0)
    for number in range(begin, stop):
        position = first + number * STRIP
        count = min(STRIP, length - position)
        for kv_head in range(kv_heads):
            record = records + 2 * HEAD_BYTES * kv_head
            prefetch_next(record, kv_head, kv_heads, table, position, length)
            attend_strip_of_head(
                rows, record, record + HEAD_BYTES, table, position, count, group, heads, kv_head * group, memory,
                weights, state, scale, softcap,
            )  # fmt: skip


@njit(nogil=True)
def _share(share: int, shares: int, starts: Any, partials: int, owners: Any, shared: int, prefix: int, call: int,
           scale: float, softcap: float) -> None:  # fmt: skip
    """Attend over one share of the line. `owners` tells for each partial result whose it is.

    `prefix`, unless 0, holds what came out of the first `shared` positions for all sequences.
    """
    key_width, value_dim = padded(get(keys_of(call), DIM)), get(values_of(call), DIM)
    num_seqs, kv_heads, group, kind = get(call, NUM_SEQS), get(call, KV_HEADS), get(call, GROUP), get(call, QUERY_KIND)
    heads, width = kv_heads * group, padded(value_dim)
    state_bytes = 4 * heads * (2 + width)
    floats = LANES * (max(key_width, width) + 1) + group * STRIP + heads * key_width + 2 * kv_heads * HEAD_BYTES // 4
    memory = np.zeros(floats + state_bytes // 4 + LANES, dtype=np.float32)
    buffer = (memory.ctypes.data + VECTOR - 1) // VECTOR * VECTOR
    state = buffer + 4 * floats
    unit, end = starts[num_seqs] * share // shares, starts[num_seqs] * (share + 1) // shares
    seq = 0
    while unit < end:
        while starts[seq + 1] <= unit:
            seq += 1
        length = load_int32(get(call, LENGTHS) + 4 * seq)
        first = _first_own(length, get(call, WINDOW), shared)
        strips = strips_between(first, length)
        begin = unit - starts[seq]
        stop = min(strips, begin + end - unit)
        _attend(seq, begin, stop, first, prefix, call, scale, softcap, buffer, state)
        if begin == 0 and stop == strips:
            finish(state, heads, width, get(call, OUT) + seq * heads * value_dim * size_of(kind), kind, value_dim)
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


@kept(nogil=True, parallel=True)
def decode(threads: int, shared: int, prefix: int, call: int, scale: float, softcap: float) -> None:
    """The whole line, in equal shares of which each thread takes one.

    `prefix` is what `attend_prefix` made of the first `shared` positions, or 0 and 0.
    """
    value_dim, kind, out = get(values_of(call), DIM), get(call, QUERY_KIND), get(call, OUT)
    lengths, num_seqs, heads = get(call, LENGTHS), get(call, NUM_SEQS), get(call, KV_HEADS) * get(call, GROUP)
    starts = _line(lengths, num_seqs, get(call, WINDOW), shared)
    _clear_empty(lengths, num_seqs, out, heads * value_dim * size_of(kind))
    shares = max(1, min(threads, starts[num_seqs] // STRIPS_WORTH_A_THREAD))
    partials = np.empty(2 * shares * heads * (2 + padded(value_dim)), dtype=np.float32)
    owners = np.full(2 * shares, -1, dtype=np.int64)
    address = partials.ctypes.data
    if shares == 1:
        _share(np.int64(0), np.int64(1), starts, address, owners, shared, prefix, call, scale, softcap)
    else:
        for share in prange(shares):
            _share(np.int64(share), np.int64(shares), starts, address, owners, shared, prefix, call, scale, softcap)
        merge_shares(shares, address, owners, heads, value_dim, out, kind)
    keep(partials)
