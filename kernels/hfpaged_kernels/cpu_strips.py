"""Strips: sixteen consecutive keys (or values) of one KV head, read from their blocks as float32 rows.

A strip is what the attention kernels work on. Its rows are padded to whole lanes with zeros, and rows behind the
end of the context are zeros too, so that nothing an unused slot holds (NaN, say) can reach the arithmetic.

A quantized row is dequantized on its way into the strip, but for a factor where one scale holds for all of it: the
factor is as well given to the row's score, or to its weight, which is one number instead of a row of them.

A cache is a record of CACHE integers, all strides in bytes:

    address, kind, stride of blocks, dim, block_size,
    where the scales begin in a head's bytes, groups of a row, address of the heads' static scales (or 0),
    stride of heads; residuals: address (or 0), stride of residuals, of rows, kind

and what is read for one head of one sequence is another that begins alike, from `head_of`.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from hfpaged_kernels.cpu_bits import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LANES,
    VECTOR,
    clear_bytes,
    convert,
    copy_bytes,
    load,
    load_bfloat16,
    load_float16,
    load_int32,
    load_one,
    load_one_bfloat16,
    prefetch,
    scratch,
    size_of,
    store,
    store_one,
)
from hfpaged_kernels.cpu_codes import (
    E4M3,
    E4M3_UNIT,
    INT4,
    INT4_CHANNEL,
    code_bytes,
    is_quantized,
    load_bytes,
    load_codes,
    load_last_codes,
    read_codes,
)
from hfpaged_kernels.cpu_math import add, multiply, splat

# Length of the record, and where the dim is in it.
CACHE, DIM = 13, 3
# Where the parts of a call begin: the query (address, kind, strides of tokens and heads), then the caches, then
# tables, their stride, lengths, residuals (address or 0), sinks, result, num_seqs, num_kv_heads, group, window.
KEYS = 4
VALUES = KEYS + CACHE
TABLES = VALUES + CACHE
LENGTHS = TABLES + 2
CALL = TABLES + 10
CACHE_LINE = 64
STRIP = 2 * LANES
_NOWHERE = 1 << 62


@njit(forceinline=True)
def padded(dim: int) -> int:
    return (dim + LANES - 1) // LANES * LANES


@njit(forceinline=True)
def strips_between(first: int, end: int) -> int:
    return (end - first + STRIP - 1) // STRIP


@njit(forceinline=True)
def head_of(cache: Any, kv_head: int, residual: int, length: int) -> Any:
    """What is read for one KV head of a sequence of `length`; `residual` is -1 if its last block is a block too.

    address, kind, stride of blocks, dim, block_size, where the scales begin, groups, address of the static scale
    (or 0), and for the residual: the first position in it, its address there, stride of rows, kind.
    """
    (
        address, kind, block_stride, dim, block_size, scales_at, groups, scales, head_stride, open_address,
        open_stride, open_row, open_kind,
    ) = cache  # fmt: skip
    unfilled = length % block_size
    is_open = residual >= 0 and open_address != 0 and unfilled > 0
    return (
        address + kv_head * head_stride, kind, block_stride, dim, block_size, scales_at, groups,
        scales + 4 * kv_head if scales != 0 else 0, length - unfilled if is_open else _NOWHERE,
        open_address + residual * open_stride + kv_head * dim * size_of(open_kind), open_row, open_kind,
    )  # fmt: skip


@njit(forceinline=True)
def has_factors(head: Any) -> bool:
    """Whether rows of this head come with a factor each that is not yet in them."""
    return is_quantized(head[1]) and head[1] < INT4


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


@njit(nogil=True)
def _read_padded(source: int, kind: int, stride: int, dim: int, rows: int, target: int) -> None:
    """Rows that lie `stride` bytes apart."""
    width = padded(dim)
    for row in range(rows):
        start = target + row * 4 * width
        convert(source + row * stride, kind, start, FLOAT32, dim)
        clear_bytes(start + 4 * dim, 4 * (width - dim))


@njit(nogil=True)
def _read_scaled_by_rows(source: int, scales: int, head: Any, offset: int, run: int, target: int, factors: int) -> None:
    """Eight bits: the codes become the rows, the scales their factors."""
    kind, dim, static = head[1], head[3], head[7]
    width = padded(dim)
    if width == dim:
        read_codes(source + offset * dim, kind, target, run * dim)
    else:
        whole = dim // LANES * LANES
        for row in range(run):
            start, at = source + (offset + row) * dim, target + 4 * row * width
            read_codes(start, kind, at, whole)
            store(at + 4 * whole, load_last_codes(start + whole, kind, dim - whole))
    unit = E4M3_UNIT if kind == E4M3 else 1.0
    if static != 0:
        for row in range(run):
            store_one(factors + 4 * row, load_one(static) * unit)
    elif run == LANES:
        store(factors, multiply(load_bfloat16(scales + 2 * offset), splat(unit)))
    else:
        for row in range(run):
            store_one(factors + 4 * row, load_one_bfloat16(scales + 2 * (offset + row)) * unit)


@njit(forceinline=True)
def _codes_at(source: int, kind: int, column: int, dim: int) -> Any:
    if column + LANES <= dim:
        return load_codes(source + code_bytes(kind, column), kind)
    return load_last_codes(source + code_bytes(kind, column), kind, dim - column)


@njit(nogil=True)
def _read_groups(source: int, scales: int, head: Any, offset: int, run: int, target: int) -> None:
    """Four bits, with a scale and a lowest value for each group of each row."""
    kind, dim, groups = head[1], head[3], head[6]
    width, each = padded(dim), padded(dim) // groups
    for row in range(run):
        codes, at = source + (offset + row) * code_bytes(kind, dim), target + 4 * row * width
        for group in range(groups):
            pair = scales + 4 * ((offset + row) * groups + group)
            scale, low = splat(load_one_bfloat16(pair)), splat(load_one_bfloat16(pair + 2))
            for column in range(group * each, (group + 1) * each, LANES):
                store(at + 4 * column, add(multiply(_codes_at(codes, kind, column, dim), scale), low))
        clear_bytes(at + 4 * dim, 4 * (width - dim))


@njit(forceinline=True)
def _bytes_at(source: int, column: int, dim: int) -> Any:
    if column + LANES <= dim:
        return load_bytes(source + column)
    buffer = scratch()
    copy_bytes(buffer, source + column, dim - column)
    return load_bytes(buffer)


@njit(nogil=True)
def _read_channels(source: int, scales: int, head: Any, offset: int, run: int, target: int) -> None:
    """Four bits, with a scale and a lowest value for each channel of the block."""
    kind, dim = head[1], head[3]
    width, row_bytes = padded(dim), code_bytes(kind, dim)
    steps = scales + 2 * dim
    scale_step, base = splat(load_one_bfloat16(steps)), splat(load_one_bfloat16(steps + 2))
    low_step = splat(load_one_bfloat16(steps + 4))
    for column in range(0, width, LANES):
        scale = multiply(_bytes_at(scales, column, dim), scale_step)
        low = add(multiply(_bytes_at(scales + dim, column, dim), low_step), base)
        for row in range(run):
            codes = _codes_at(source + (offset + row) * row_bytes, kind, column, dim)
            store(target + 4 * (row * width + column), add(multiply(codes, scale), low))
    if width > dim:
        for row in range(run):
            clear_bytes(target + 4 * (row * width + dim), 4 * (width - dim))


@njit(nogil=True)
def read_strip(head: Any, table: int, position: int, rows: int, capacity: int, target: int, factors: int) -> int:
    """Rows position .. position + rows of one head, as [capacity, padded(dim)] float32.

    The result is `target`, or the cache itself where the rows lie there in just that form. Where `has_factors`,
    factors[capacity] becomes what each row must be multiplied by.
    """
    (
        address, kind, block_stride, dim, block_size, scales_at, _, _, open_from, open_address, open_row, open_kind,
    ) = head  # fmt: skip
    width, row_bytes = padded(dim), dim * size_of(kind)
    done = 0
    if kind == FLOAT32 and width == dim and rows == capacity:
        index = position // block_size
        offset = position - index * block_size
        if offset + rows <= block_size:
            return address + load_int32(table + 4 * index) * block_stride + offset * row_bytes
    if is_quantized(kind):
        clear_bytes(factors, 4 * capacity)
    while done < rows:
        index = (position + done) // block_size
        offset = position + done - index * block_size
        run = min(rows - done, block_size - offset)
        start, own = target + done * 4 * width, factors + 4 * done
        if position + done >= open_from:
            _read_padded(open_address + offset * open_row, open_kind, open_row, dim, run, start)
            for row in range(run):
                store_one(own + 4 * row, 1.0)
        else:
            source = address + load_int32(table + 4 * index) * block_stride
            if kind == INT4_CHANNEL:
                _read_channels(source, source + scales_at, head, offset, run, start)
            elif kind == INT4:
                _read_groups(source, source + scales_at, head, offset, run, start)
            elif is_quantized(kind):
                _read_scaled_by_rows(source, source + scales_at, head, offset, run, start, own)
            elif width == dim:
                _read_rows(source + offset * row_bytes, kind, start, run * width)
            else:
                _read_padded(source + offset * row_bytes, kind, row_bytes, dim, run, start)
        done += run
    if rows < capacity:
        clear_bytes(target + rows * 4 * width, (capacity - rows) * 4 * width)
    return target


@njit(nogil=True)
def scale_rows(rows: int, width: int, count: int, factors: int) -> None:
    """Give each row its factor."""
    for row in range(count):
        factor = splat(load_one(factors + 4 * row))
        for at in range(rows + 4 * row * width, rows + 4 * (row + 1) * width, VECTOR):
            store(at, multiply(load(at), factor))


@njit(nogil=True)
def prefetch_strip(head: Any, table: int, position: int, rows: int) -> None:
    """Ask for the memory that `read_strip` will read: blocks lie anywhere, the CPU cannot guess the next one."""
    address, kind, block_stride, dim, block_size, scales_at = head[0], head[1], head[2], head[3], head[4], head[5]
    quantized = is_quantized(kind)
    row_bytes = code_bytes(kind, dim) if quantized else dim * size_of(kind)
    done = 0
    while done < rows:
        index = (position + done) // block_size
        offset = position + done - index * block_size
        run = min(rows - done, block_size - offset)
        block = address + load_int32(table + 4 * index) * block_stride
        source = block + offset * row_bytes
        for line in range(0, run * row_bytes, CACHE_LINE):
            prefetch(source + line)
        if quantized:
            prefetch(block + scales_at)
            prefetch(block + scales_at + CACHE_LINE)
        done += run
