"""Strips: sixteen consecutive keys (or values) of one KV head, read from their blocks as float32 rows.

A strip is what the attention kernels work on. Its rows are padded to whole lanes with zeros, and rows behind the
end of the context are zeros too, so that nothing an unused slot holds (NaN, say) can reach the arithmetic.
"""

from __future__ import annotations

from numba import njit

from hfpaged_kernels.cpu_bits import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LANES,
    clear_bytes,
    convert,
    load,
    load_bfloat16,
    load_float16,
    padded,
    prefetch,
    size_of,
    store,
    store_one,
)
from hfpaged_kernels.cpu_codes import code_bytes, is_quantized
from hfpaged_kernels.cpu_dequantizing import read_quantized
from hfpaged_kernels.cpu_records import (
    BLOCK_SIZE,
    DIM,
    KIND,
    OPEN,
    OPEN_FROM,
    OPEN_KIND,
    OPEN_ROW,
    SCALES_AT,
    block_at,
    get,
)

CACHE_LINE = 64
STRIP = 2 * LANES


@njit(forceinline=True)
def strips_between(first: int, end: int) -> int:
    return (end - first + STRIP - 1) // STRIP


@njit(forceinline=True)
def _read_native(source: int, kind: int, target: int, count: int) -> None:
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
def read_strip(head: int, table: int, position: int, rows: int, target: int, factors: int) -> int:
    """Rows position .. position + rows of one head, as [16, padded(dim)] float32.

    The result is `target`, or the cache itself where the rows lie there in just that form. Where `has_factors`,
    factors[16] becomes what each row must be multiplied by.
    """
    if is_quantized(get(head, KIND)):
        _read_quantized_strip(head, table, position, rows, target, factors)
        return target
    return _read_native_strip(head, table, position, rows, target)


@njit(nogil=True)
def _read_native_strip(head: int, table: int, position: int, rows: int, target: int) -> int:
    kind, dim, block_size = get(head, KIND), get(head, DIM), get(head, BLOCK_SIZE)
    width, row_bytes = padded(dim), dim * size_of(kind)
    done = 0
    if kind == FLOAT32 and width == dim and rows == LANES:
        index = position // block_size
        offset = position - index * block_size
        if offset + rows <= block_size:
            return block_at(head, table, index) + offset * row_bytes
    while done < rows:
        index = (position + done) // block_size
        offset = position + done - index * block_size
        run = min(rows - done, block_size - offset)
        source = block_at(head, table, index) + offset * row_bytes
        if width == dim:
            _read_native(source, kind, target + done * 4 * width, run * width)
        else:
            _read_padded(source, kind, row_bytes, dim, run, target + done * 4 * width)
        done += run
    if rows < LANES:
        clear_bytes(target + rows * 4 * width, (LANES - rows) * 4 * width)
    return target


@njit(nogil=True)
def _read_quantized_strip(head: int, table: int, position: int, rows: int, target: int, factors: int) -> None:
    dim, block_size, open_from = get(head, DIM), get(head, BLOCK_SIZE), get(head, OPEN_FROM)
    row_bytes = 4 * padded(dim)
    done = 0
    while done < rows:
        index = (position + done) // block_size
        offset = position + done - index * block_size
        run = min(rows - done, block_size - offset)
        start, own = target + done * row_bytes, factors + 4 * done
        if position + done >= open_from:
            stride = get(head, OPEN_ROW)
            _read_padded(get(head, OPEN) + offset * stride, get(head, OPEN_KIND), stride, dim, run, start)
            for row in range(run):
                store_one(own + 4 * row, 1.0)
        else:
            read_quantized(head, block_at(head, table, index), offset, run, start, own)
        done += run
    if rows < LANES:
        clear_bytes(target + rows * row_bytes, (LANES - rows) * row_bytes)
        clear_bytes(factors + 4 * rows, 4 * (LANES - rows))


@njit(nogil=True)
def prefetch_strip(head: int, table: int, position: int, rows: int) -> None:
    """Ask for the memory that `read_strip` will read: blocks lie anywhere, the CPU cannot guess the next one."""
    kind, dim, block_size = get(head, KIND), get(head, DIM), get(head, BLOCK_SIZE)
    quantized = is_quantized(kind)
    row_bytes = code_bytes(kind, dim) if quantized else dim * size_of(kind)
    done = 0
    while done < rows:
        index = (position + done) // block_size
        offset = position + done - index * block_size
        run = min(rows - done, block_size - offset)
        block = block_at(head, table, index)
        source = block + offset * row_bytes
        for line in range(0, run * row_bytes, CACHE_LINE):
            prefetch(source + line)
        if quantized:
            prefetch(block + get(head, SCALES_AT))
            prefetch(block + get(head, SCALES_AT) + CACHE_LINE)
        done += run
