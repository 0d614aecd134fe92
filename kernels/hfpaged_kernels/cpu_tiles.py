"""Tiles: many query rows of one KV head against a strip of keys and values.

A query row lies in each lane, so that the softmax needs no sum across lanes, and two vectors of rows meet eight
keys (or columns of values) at a time, so that sixteen sums stay in registers.

The state of one vector of rows, float32, all with 16 lanes: maximum, sum, totals [padded(value_dim)].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from hfpaged_kernels.cpu_bits import (
    FLOAT32,
    FLOATS,
    LANES,
    NOTHING,
    VECTOR,
    add,
    clear_bytes,
    convert,
    emitter,
    exp,
    fuse,
    fused,
    larger,
    largest,
    load,
    load_one,
    multiply,
    read,
    size_of,
    splat,
    splat_of,
    store,
    store_one,
    subtract,
    tanh,
    where_at_most,
    write,
)
from hfpaged_kernels.cpu_strips import STRIP, padded, prefetch_strip, read_strip

_COLUMNS = 8


@njit(forceinline=True)
def vectors_of(rows: int) -> int:
    return (rows + LANES - 1) // LANES


@njit(forceinline=True)
def state_bytes(width: int) -> int:
    """Of one vector of rows."""
    return (2 + width) * VECTOR


@njit(forceinline=True)
def strips_bytes(key_width: int, width: int) -> int:
    """Room for a strip of keys, a strip of values, and the scores of two vectors of rows."""
    return STRIP * (4 * (key_width + width) + 2 * VECTOR)


@njit(nogil=True)
def begin_rows(state: int, vectors: int, sinks: int, first_row: int, group: int, width: int) -> None:
    """A sink counts as a key that was seen before all others: its logit is the maximum, its weight 1."""
    for row in range(vectors * LANES):
        logit = load_one(sinks + 4 * ((first_row + row) % group)) if sinks != 0 else NOTHING
        at = state + row // LANES * state_bytes(width) + row % LANES * 4
        store_one(at, logit)
        store_one(at + VECTOR, 1.0 if sinks != 0 else 0.0)
    for vector in range(vectors):
        clear_bytes(state + vector * state_bytes(width) + 2 * VECTOR, width * VECTOR)


@njit(nogil=True)
def turn_queries(
    query: int, kind: int, stride: int, head_stride: int, first_row: int, rows: int, group: int, dim: int,
    scale: float, buffer: int, target: int,
) -> None:  # fmt: skip
    """Rows of one KV head's queries, scaled, into target[vectors, dim, 16]."""
    clear_bytes(target, vectors_of(rows) * VECTOR * dim)
    for row in range(rows):
        token = (first_row + row) // group
        source = query + token * stride + (first_row + row - token * group) * head_stride
        convert(source, kind, buffer, FLOAT32, dim)
        column = target + row // LANES * VECTOR * dim + row % LANES * 4
        for d in range(dim):
            store_one(column + d * VECTOR, load_one(buffer + 4 * d) * np.float32(scale))


def _products_of(vectors: int, fresh: bool) -> Any:
    """Products of `count` lanes with eight columns of scalars, for one vector or two:

    target[v, c] = (0 if fresh else target[v, c]) + sum over i of scalars[i, c] * operands[v, i]

    Strides, in bytes: of a scalar's row and column (row 16 and those behind it lie `jump` further), of a vector of
    operands, of a vector of the target.
    """

    @emitter(types.void, *[types.int64] * 9)
    def products(
        builder: Any, scalars: Any, row_bytes: Any, jump: Any, column_bytes: Any, operands: Any, operand_bytes: Any,
        count: Any, target: Any, target_bytes: Any,
    ) -> None:  # fmt: skip
        index = ir.IntType(64)

        def place(base: Any, number: Any, step: Any) -> Any:
            number = ir.Constant(index, number) if isinstance(number, int) else number
            step = ir.Constant(index, step) if isinstance(step, int) else step
            return builder.add(base, builder.mul(number, step))

        def target_of(v: int, c: int) -> Any:
            return place(place(target, v, target_bytes), c, VECTOR)

        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(_COLUMNS)] for _ in range(vectors)]
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        for v in range(vectors):
            for c in range(_COLUMNS):
                builder.store(zero if fresh else read(builder, target_of(v, c)), sums[v][c])
        start, step = ir.Constant(index, 0), ir.Constant(index, 1)
        with cgutils.for_range_slice(builder, start, count, step, intp=index) as (i, _):
            at = place(operands, i, VECTOR)
            rows = [read(builder, place(at, v, operand_bytes)) for v in range(vectors)]
            behind = builder.icmp_signed(">=", i, ir.Constant(index, LANES))
            row = builder.add(place(scalars, i, row_bytes), builder.select(behind, jump, start))
            for c in range(_COLUMNS):
                scalar = splat_of(builder, place(row, c, column_bytes))
                for v in range(vectors):
                    builder.store(fuse(builder, scalar, rows[v], builder.load(sums[v][c])), sums[v][c])
        for v in range(vectors):
            for c in range(_COLUMNS):
                write(builder, target_of(v, c), builder.load(sums[v][c]))

    return products


_products_of_one, _products_of_two = _products_of(1, fresh=True), _products_of(2, fresh=True)
_add_products_to_one, _add_products_to_two = _products_of(1, fresh=False), _products_of(2, fresh=False)


@njit(nogil=True)
def _score(queries: int, pair: bool, dim: int, keys: int, jump: int, key_bytes: int, scores: int) -> None:
    """scores[1 or 2, STRIP, 16] of one vector of query rows or a pair."""
    for key in range(0, STRIP, _COLUMNS):
        row, at = keys + key * key_bytes + (jump if key >= LANES else 0), scores + key * VECTOR
        if pair:
            _products_of_two(row, 4, 0, key_bytes, queries, dim * VECTOR, dim, at, STRIP * VECTOR)
        else:
            _products_of_one(row, 4, 0, key_bytes, queries, dim * VECTOR, dim, at, STRIP * VECTOR)


@njit(nogil=True)
def _add_values(state: int, pair: bool, weights: int, values: int, jump: int, width: int, count: int) -> None:
    """totals[1 or 2, width, 16] += values[count, width].T @ weights[1 or 2, count, 16]."""
    row_bytes, gap = 4 * width, STRIP * VECTOR
    for column in range(0, width, _COLUMNS):
        at, scalars = state + (2 + column) * VECTOR, values + 4 * column
        if pair:
            _add_products_to_two(scalars, row_bytes, jump, 4, weights, gap, count, at, state_bytes(width))
        else:
            _add_products_to_one(scalars, row_bytes, jump, 4, weights, gap, count, at, state_bytes(width))


@njit(nogil=True)
def _limit(scores: int, softcap: float) -> None:
    cap, inverse = splat(softcap), splat(np.float32(1.0) / np.float32(softcap))
    for key in range(STRIP):
        at = scores + key * VECTOR
        store(at, multiply(cap, tanh(multiply(load(at), inverse))))


@njit(nogil=True)
def _hide(scores: int, position: int, positions: Any, window: int) -> None:
    """Minus infinity for the keys (from `position` on) that a row does not see."""
    hidden = splat(-np.inf)
    oldest = subtract(positions, splat(np.float32(window - 1)))
    for key in range(STRIP):
        at, here = scores + key * VECTOR, splat(np.float32(position + key))
        score = where_at_most(here, positions, load(at), hidden)
        if window > 0:
            score = where_at_most(oldest, here, score, hidden)
        store(at, score)


@njit(nogil=True)
def _weigh(scores: int, state: int, width: int) -> None:
    """Scores become weights under the new maxima, under which all that was summed before is brought as well."""
    old = load(state)
    a, b, c, d = old, old, old, old
    for key in range(0, STRIP, 4):
        at = scores + key * VECTOR
        a, b = larger(load(at), a), larger(load(at + VECTOR), b)
        c, d = larger(load(at + 2 * VECTOR), c), larger(load(at + 3 * VECTOR), d)
    top = larger(larger(a, b), larger(c, d))
    added = load(state + VECTOR)
    if largest(subtract(top, old)) > 0:
        factor = exp(subtract(old, top))
        added = multiply(added, factor)
        for at in range(state + 2 * VECTOR, state + state_bytes(width), VECTOR):
            store(at, multiply(load(at), factor))
        store(state, top)
    for key in range(STRIP):
        weight = exp(subtract(load(scores + key * VECTOR), top))
        store(scores + key * VECTOR, weight)
        added = add(added, weight)
    store(state + VECTOR, added)


@njit(forceinline=True)
def _read(
    cache: int, kind: int, block_stride: int, dim: int, block_size: int, table: int, position: int, count: int,
    buffer: int,
) -> Any:  # fmt: skip
    """A strip of two times sixteen rows, and how much further the second sixteen lie than right behind the first.

    Sixteen at a time, as so many often lie in one block and need no copy.
    """
    first, half = min(count, LANES), 4 * LANES * padded(dim)
    a = read_strip(cache, kind, block_stride, dim, block_size, table, position, first, LANES, buffer)
    b = read_strip(
        cache, kind, block_stride, dim, block_size, table, position + LANES, count - first, LANES, buffer + half
    )
    return a, b - a - half


@njit(nogil=True)
def _attend_strip(
    queries: int, rows: int, key_dim: int, keys: int, key_jump: int, values: int, value_jump: int, width: int,
    position: int, count: int, positions: int, window: int, softcap: float, scores: int, state: int,
) -> None:  # fmt: skip
    """Fold `count` keys and values, the first of which is at `position`, into the state of all rows that see them."""
    for vector in range(0, vectors_of(rows), 2):
        first, end = vector * LANES, min(rows, (vector + 2) * LANES)
        lowest, highest = load_one(positions + 4 * first), load_one(positions + 4 * (end - 1))
        if position > highest or (window > 0 and position + STRIP <= lowest - window + 1):
            continue
        pair = end - first > LANES
        hides = position + STRIP - 1 > lowest or (window > 0 and position <= highest - window)
        own = state + vector * state_bytes(width)
        _score(queries + vector * VECTOR * key_dim, pair, key_dim, keys, key_jump, 4 * padded(key_dim), scores)
        for i in range(2 if pair else 1):
            part = scores + i * STRIP * VECTOR
            if softcap > 0:
                _limit(part, softcap)
            if hides:
                _hide(part, position, load(positions + (vector + i) * VECTOR), window)
            _weigh(part, own + i * state_bytes(width), width)
        _add_values(own, pair, scores, values, value_jump, width, count)


@njit(nogil=True)
def attend_strips(
    queries: int, rows: int, positions: int, keys: int, values: int, kind: int, key_block: int, value_block: int,
    key_dim: int, value_dim: int, block_size: int, table: int, first: int, stop: int, end: int, window: int,
    softcap: float, buffer: int, state: int,
) -> None:  # fmt: skip
    """Fold the strips that begin at first .. stop, of a context that ends at `end`, into the state of the rows.

    queries: from `turn_queries`; positions[rows] float32, ascending: where each row is, which sees the keys up to
    there (lanes behind the last row hold -1: they see nothing); keys, values: one head of the caches; buffer:
    strips_bytes.
    """
    width = padded(value_dim)
    scores = buffer + 4 * STRIP * (padded(key_dim) + width)
    for position in range(first, stop, STRIP):
        ahead = position + STRIP
        if ahead < stop:
            left = min(STRIP, end - ahead)
            prefetch_strip(keys, kind, key_block, key_dim, block_size, table, ahead, left)
            prefetch_strip(values, kind, value_block, value_dim, block_size, table, ahead, left)
        count = min(STRIP, end - position)
        own_keys, key_jump = _read(keys, kind, key_block, key_dim, block_size, table, position, count, buffer)
        own_values, value_jump = _read(
            values, kind, value_block, value_dim, block_size, table, position, count,
            buffer + 4 * STRIP * padded(key_dim),
        )  # fmt: skip
        _attend_strip(
            queries, rows, key_dim, own_keys, key_jump, own_values, value_jump, width, position, count, positions,
            window, softcap, scores, state,
        )  # fmt: skip


@njit(nogil=True)
def merge_rows(state: int, other: int, vectors: int, width: int) -> None:
    """Add the partial result `other` to `state`."""
    for vector in range(vectors):
        mine, theirs = state + vector * state_bytes(width), other + vector * state_bytes(width)
        top = larger(load(mine), load(theirs))
        kept, taken = exp(subtract(load(mine), top)), exp(subtract(load(theirs), top))
        store(mine, top)
        # The sum and the totals.
        for at in range(VECTOR, state_bytes(width), VECTOR):
            store(mine + at, fused(load(mine + at), kept, multiply(load(theirs + at), taken)))


@njit(nogil=True)
def read_row(state: int, row: int, width: int, maximum: int, total: int, totals: int) -> None:
    """The state of one row, out of its lane: its maximum, its sum and its totals[width]."""
    lane = state + row // LANES * state_bytes(width) + row % LANES * 4
    store_one(maximum, load_one(lane))
    store_one(total, load_one(lane + VECTOR))
    for d in range(width):
        store_one(totals + 4 * d, load_one(lane + (2 + d) * VECTOR))


@njit(nogil=True)
def finish_rows(
    state: int, rows: int, first_row: int, group: int, width: int, dim: int, buffer: int, out: int, kind: int,
    token_bytes: int,
) -> None:  # fmt: skip
    """Divide by the sums and write the rows; `out` is the head's first token. Takes a buffer of width + 2."""
    total = buffer + 4 * width
    for row in range(rows):
        read_row(state, row, width, total + 4, total, buffer)
        inverse = splat(np.float32(1.0) / load_one(total))
        for column in range(buffer, total, VECTOR):
            store(column, multiply(load(column), inverse))
        token = (first_row + row) // group
        head = first_row + row - token * group
        convert(buffer, FLOAT32, out + token * token_bytes + head * dim * size_of(kind), kind, dim)
