"""Strips: sixteen consecutive keys (or values) of one KV head, read from their blocks as float32 rows.

A strip is what the attention kernels work on. Its rows are padded to whole lanes with zeros, and rows behind the
end of the context are zeros too, so that nothing an unused slot holds (NaN, say) can reach the arithmetic.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from hfpaged_kernels.cpu_bits import (
    BFLOAT16,
    FLOAT16,
    FLOATS,
    LANES,
    clear_bytes,
    convert,
    emitter,
    fuse,
    fused,
    lanes,
    load,
    load_bfloat16,
    load_float16,
    load_int32,
    load_one,
    prefetch,
    shuffle,
    size_of,
    splat,
    store,
)

CACHE_LINE = 64
STRIP = 2 * LANES


@njit(forceinline=True)
def padded(dim: int) -> int:
    return (dim + LANES - 1) // LANES * LANES


@njit(forceinline=True)
def strips_between(first: int, end: int) -> int:
    return (end - first + STRIP - 1) // STRIP


@njit(forceinline=True)
def _read_rows(source: int, kind: int, target: int, count: int) -> None:
    """`count` whole lanes' worth of contiguous elements."""
    if kind == BFLOAT16:
        for i in range(0, count, LANES):
            store(target + 4 * i, load_bfloat16(source + 2 * i))
    elif kind == FLOAT16:
        for i in range(0, count, LANES):
            store(target + 4 * i, load_float16(source + 2 * i))
    else:
        for i in range(0, count, LANES):
            store(target + 4 * i, load(source + 4 * i))


@njit(forceinline=True)
def read_strip(
    cache: int, kind: int, block_stride: int, dim: int, block_size: int, table: int, position: int, rows: int,
    target: int,
) -> int:  # fmt: skip
    """Rows position .. position + rows of the head at `cache` into `target` ([16, padded(dim)] float32)."""
    width, row_bytes = padded(dim), dim * size_of(kind)
    done = 0
    while done < rows:
        index = (position + done) // block_size
        offset = position + done - index * block_size
        run = min(rows - done, block_size - offset)
        source = cache + load_int32(table + 4 * index) * block_stride + offset * row_bytes
        if width == dim:
            _read_rows(source, kind, target + done * 4 * width, run * width)
        else:
            for row in range(run):
                start = target + (done + row) * 4 * width
                convert(source + row * row_bytes, kind, start, 0, dim)
                clear_bytes(start + 4 * dim, 4 * (width - dim))
        done += run
    if rows < STRIP:
        clear_bytes(target + rows * 4 * width, (STRIP - rows) * 4 * width)
    return target


@njit(forceinline=True)
def prefetch_strip(
    cache: int, kind: int, block_stride: int, dim: int, block_size: int, table: int, position: int, rows: int
) -> None:
    """Ask for the memory that `read_strip` will read: blocks lie anywhere, the CPU cannot guess the next one."""
    row_bytes = dim * size_of(kind)
    done = 0
    while done < rows:
        index = (position + done) // block_size
        offset = position + done - index * block_size
        run = min(rows - done, block_size - offset)
        source = cache + load_int32(table + 4 * index) * block_stride + offset * row_bytes
        for line in range(0, run * row_bytes, CACHE_LINE):
            prefetch(source + line)
        done += run


@emitter(lanes, types.int64, types.int64, types.int64)
def score_strip(builder: Any, query: Any, keys: Any, width: Any) -> Any:
    """The products of one query row with the sixteen rows of a strip, one in each lane."""
    index, step = ir.IntType(64), ir.Constant(ir.IntType(64), LANES)
    sums = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * LANES)) for _ in range(LANES)]
    for slot in sums:
        builder.store(ir.Constant(FLOATS, [0.0] * LANES), slot)
    row_bytes = builder.mul(width, ir.Constant(index, 4))
    with cgutils.for_range_slice(builder, ir.Constant(index, 0), width, step, intp=index) as (column, _):
        offset = builder.mul(column, ir.Constant(index, 4))
        chunk = _read(builder, builder.add(query, offset))
        row = builder.add(keys, offset)
        for slot in sums:
            builder.store(fuse(builder, chunk, _read(builder, row), builder.load(slot)), slot)
            row = builder.add(row, row_bytes)
    return _total_each(builder, [builder.load(slot) for slot in sums])


def _read(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, FLOATS.as_pointer()), align=4)


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
def add_weighted(total: int, weights: int, values: int, width: int, rows: int) -> None:
    """total[width] += weights[rows] @ values[rows, width], four vectors at a time so that sums overlap."""
    column, end = 0, 4 * width
    while column + 16 * LANES <= end:
        at = total + column
        a, b = load(at), load(at + 4 * LANES)
        c, d = load(at + 8 * LANES), load(at + 12 * LANES)
        row = values + column
        for i in range(rows):
            weight = splat(load_one(weights + 4 * i))
            a = fused(weight, load(row), a)
            b = fused(weight, load(row + 4 * LANES), b)
            c = fused(weight, load(row + 8 * LANES), c)
            d = fused(weight, load(row + 12 * LANES), d)
            row += end
        store(at, a)
        store(at + 4 * LANES, b)
        store(at + 8 * LANES, c)
        store(at + 12 * LANES, d)
        column += 16 * LANES
    while column < end:
        a = load(total + column)
        row = values + column
        for i in range(rows):
            a = fused(splat(load_one(weights + 4 * i)), load(row), a)
            row += end
        store(total + column, a)
        column += 4 * LANES
