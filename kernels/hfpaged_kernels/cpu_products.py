"""The two products of decode: query rows with a strip of keys, weights with a strip of values."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from hfpaged_kernels.cpu_bits import (
    FLOATS,
    LANES,
    VECTOR,
    emitter,
    fuse,
    lanes,
    load,
    load_one,
    read,
    shuffle,
    store,
)
from hfpaged_kernels.cpu_math import add, fused, splat


def _scores_of(width: int | None) -> Any:
    """The scoring of a strip whose rows are `width` wide; a width known in advance makes addresses constants."""

    @emitter(lanes, types.int64, types.int64, types.int64)
    def score(builder: Any, query: Any, keys: Any, any_width: Any) -> Any:
        index = ir.IntType(64)
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(LANES)]
        for total in sums:
            builder.store(zero, total)
        end = any_width if width is None else ir.Constant(index, width)
        row_bytes = builder.mul(end, ir.Constant(index, 4))
        start, step = ir.Constant(index, 0), ir.Constant(index, LANES)
        with cgutils.for_range_slice(builder, start, end, step, intp=index) as (column, _):
            offset = builder.mul(column, ir.Constant(index, 4))
            chunk = read(builder, builder.add(query, offset))
            row = builder.add(keys, offset)
            for total in sums:
                builder.store(fuse(builder, chunk, read(builder, row), builder.load(total)), total)
                row = builder.add(row, row_bytes)
        return _total_each(builder, [builder.load(total) for total in sums])

    return score


_score_64, _score_128, _score_any = _scores_of(64), _scores_of(128), _scores_of(None)


@njit(nogil=True)
def score_strip(queries: int, keys: int, width: int, group: int, scores: int, stride: int) -> None:
    """The products of `group` query rows with sixteen rows of keys; those of one query lie side by side."""
    for g in range(group):
        query = queries + 4 * g * width
        if width == 64:
            store(scores + g * stride, _score_64(query, keys, width))
        elif width == 128:
            store(scores + g * stride, _score_128(query, keys, width))
        else:
            store(scores + g * stride, _score_any(query, keys, width))


def _total_each(builder: Any, sums: list[Any]) -> Any:
    """Sixteen vectors into one whose lane i is the total of vector i.

    Each round folds two vectors into one, so that it takes 15 pairs of shuffles where one total after the other
    would take 64 shuffles.
    """
    width = LANES
    while len(sums) > 1:
        half = width // 2
        low = [(i % half) + i // width * width + (LANES if i % width >= half else 0) for i in range(LANES)]
        high = [i + half for i in low]
        pairs = zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)
        sums = [builder.fadd(shuffle(builder, a, b, low), shuffle(builder, a, b, high)) for a, b in pairs]
        width = half
    return sums[0]


@njit(forceinline=True)
def _add_to_two(total: int, weights: int, stride: int, values: int, width: int, rows: int) -> None:
    """Two heads at once, so that eight sums overlap and each value is read once for both."""
    row_bytes = 4 * width
    for column in range(0, row_bytes, 4 * VECTOR):
        at, other = total + column, total + row_bytes + column
        a, b, c, d = load(at), load(at + VECTOR), load(at + 2 * VECTOR), load(at + 3 * VECTOR)
        e, f, g, h = load(other), load(other + VECTOR), load(other + 2 * VECTOR), load(other + 3 * VECTOR)
        row = values + column
        for i in range(rows):
            p, q = splat(load_one(weights + 4 * i)), splat(load_one(weights + stride + 4 * i))
            v, w, x, y = load(row), load(row + VECTOR), load(row + 2 * VECTOR), load(row + 3 * VECTOR)
            a, b, c, d = fused(p, v, a), fused(p, w, b), fused(p, x, c), fused(p, y, d)
            e, f, g, h = fused(q, v, e), fused(q, w, f), fused(q, x, g), fused(q, y, h)
            row += row_bytes
        store(at, a)
        store(at + VECTOR, b)
        store(at + 2 * VECTOR, c)
        store(at + 3 * VECTOR, d)
        store(other, e)
        store(other + VECTOR, f)
        store(other + 2 * VECTOR, g)
        store(other + 3 * VECTOR, h)


@njit(forceinline=True)
def _add_to_one(total: int, weights: int, values: int, width: int, rows: int) -> None:
    row_bytes = 4 * width
    column = 0
    while column + 4 * VECTOR <= row_bytes:
        at = total + column
        a, b, c, d = load(at), load(at + VECTOR), load(at + 2 * VECTOR), load(at + 3 * VECTOR)
        e = f = g = h = splat(0.0)
        row = values + column
        for i in range(0, rows - 1, 2):
            p, q = splat(load_one(weights + 4 * i)), splat(load_one(weights + 4 * i + 4))
            a, b = fused(p, load(row), a), fused(p, load(row + VECTOR), b)
            c, d = fused(p, load(row + 2 * VECTOR), c), fused(p, load(row + 3 * VECTOR), d)
            row += row_bytes
            e, f = fused(q, load(row), e), fused(q, load(row + VECTOR), f)
            g, h = fused(q, load(row + 2 * VECTOR), g), fused(q, load(row + 3 * VECTOR), h)
            row += row_bytes
        if rows % 2 == 1:
            p = splat(load_one(weights + 4 * rows - 4))
            a, b = fused(p, load(row), a), fused(p, load(row + VECTOR), b)
            c, d = fused(p, load(row + 2 * VECTOR), c), fused(p, load(row + 3 * VECTOR), d)
        store(at, add(a, e))
        store(at + VECTOR, add(b, f))
        store(at + 2 * VECTOR, add(c, g))
        store(at + 3 * VECTOR, add(d, h))
        column += 4 * VECTOR
    while column < row_bytes:
        a = load(total + column)
        row = values + column
        for i in range(rows):
            a = fused(splat(load_one(weights + 4 * i)), load(row), a)
            row += row_bytes
        store(total + column, a)
        column += VECTOR


@njit(nogil=True)
def add_weighted(totals: int, weights: int, stride: int, values: int, width: int, group: int, rows: int) -> None:
    """totals[group, width] += weights[group, rows] @ values[rows, width]; `stride` is that of `weights`."""
    g = 0
    if width % (4 * LANES) == 0:
        while g + 2 <= group:
            _add_to_two(totals + 4 * g * width, weights + g * stride, stride, values, width, rows)
            g += 2
    while g < group:
        _add_to_one(totals + 4 * g * width, weights + g * stride, values, width, rows)
        g += 1
