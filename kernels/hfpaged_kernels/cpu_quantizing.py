"""Quantizing on CPU: the arithmetic of `quantizing` in its order, so that the bytes are the same.

Rows are read into a buffer as float32 first, padded to whole lanes with their first number, which changes no least and
no greatest one. Codes are made one to a byte; where they have four bits they are packed then.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hfpaged_kernels.cpu_bits import (
    FLOAT32,
    LANES,
    VECTOR,
    convert,
    keep,
    load,
    load_int64,
    load_one,
    padded,
    store_one,
)
from hfpaged_kernels.cpu_channels import quantize_channels, write_codes
from hfpaged_kernels.cpu_codes import E4M3, INT4, INT4_CHANNEL, INT8, code_bytes, store_codes
from hfpaged_kernels.cpu_kept import kept
from hfpaged_kernels.cpu_math import multiply, splat, subtract
from hfpaged_kernels.cpu_records import (
    ADDRESS,
    BLOCK_SIZE,
    BLOCK_STRIDE,
    DIM,
    GROUPS,
    HEAD_STRIDE,
    KIND,
    SCALES_AT,
    STATIC,
    get,
)
from hfpaged_kernels.cpu_rounding import (
    clamp,
    down,
    greatest,
    greatest_of,
    inverse_of,
    least,
    least_of,
    size,
    store_one_bfloat16,
    up,
)


@njit(nogil=True)
def _row_into(source: int, kind: int, dim: int, target: int) -> None:
    convert(source, kind, target, FLOAT32, dim)
    for column in range(dim, padded(dim)):
        store_one(target + 4 * column, load_one(target))


@njit(forceinline=True)
def _largest(kind: int) -> float:
    if kind == INT8:
        return 127.0
    return 448.0 if kind == E4M3 else 57344.0


@njit(nogil=True)
def _quantize_scaled(row: int, kind: int, static: int, dim: int, codes: int, scale: int) -> None:
    """Eight bits, and one scale for the row, which is written unless it is static."""
    width, largest = padded(dim), _largest(kind)
    if static != 0:
        inverse = splat(np.float32(1.0) / load_one(static))
    else:
        top = splat(0.0)
        for at in range(row, row + 4 * width, VECTOR):
            top = greatest(top, size(load(at)))
        own = up(multiply(greatest_of(top), splat(1.0 / largest)))
        store_one_bfloat16(scale, own)
        inverse = inverse_of(own)
    for column in range(0, width, LANES):
        scaled = multiply(load(row + 4 * column), inverse)
        store_codes(codes + column, kind, clamp(scaled, splat(-largest), splat(largest)))


@njit(nogil=True)
def _quantize_groups(row: int, groups: int, dim: int, codes: int, scales: int) -> None:
    """Four bits, and for each group a scale and a lowest value."""
    each = padded(dim) // groups
    for group in range(groups):
        first, pair = group * each, scales + 4 * group
        lowest = highest = load(row + 4 * first)
        for column in range(first + LANES, first + each, LANES):
            lowest = least(lowest, load(row + 4 * column))
            highest = greatest(highest, load(row + 4 * column))
        low = down(least_of(lowest))
        scale = up(multiply(subtract(greatest_of(highest), low), splat(1 / 15)))
        store_one_bfloat16(pair, scale)
        store_one_bfloat16(pair + 2, low)
        inverse = inverse_of(scale)
        for column in range(first, first + each, LANES):
            scaled = multiply(subtract(load(row + 4 * column), low), inverse)
            store_codes(codes + column, INT4, clamp(scaled, splat(0.0), splat(15.0)))


@njit(forceinline=True)
def _static_of(cache: int, head: int) -> int:
    static = get(cache, STATIC)
    return static + 4 * head if static != 0 else 0


@njit(nogil=True)
def _write_row(cache: int, block: int, head: int, offset: int, row: int, codes: int) -> None:
    """Quantize one row into one head of a block, which is at `block`."""
    kind, dim, groups = get(cache, KIND), get(cache, DIM), get(cache, GROUPS)
    scales = block + get(cache, SCALES_AT)
    if kind == INT4:
        _quantize_groups(row, groups, dim, codes, scales + 4 * offset * groups)
    else:
        _quantize_scaled(row, kind, _static_of(cache, head), dim, codes, scales + 2 * offset)
    write_codes(codes, kind, dim, block + offset * code_bytes(kind, dim))


@kept(nogil=True)
def write_tokens(
    source: int, source_kind: int, token_stride: int, source_head_stride: int, cache: int, slots: int,
    num_tokens: int, num_heads: int,
) -> None:  # fmt: skip
    """Quantize each token's heads at its slot; a negative slot is skipped."""
    dim, block_size = get(cache, DIM), get(cache, BLOCK_SIZE)
    memory = np.empty(2 * padded(dim), dtype=np.float32)
    row = memory.ctypes.data
    for token in range(num_tokens):
        slot = load_int64(slots + 8 * token)
        if slot < 0:
            continue
        index = slot // block_size
        block = get(cache, ADDRESS) + index * get(cache, BLOCK_STRIDE)
        for head in range(num_heads):
            _row_into(source + token * token_stride + head * source_head_stride, source_kind, dim, row)
            start = block + head * get(cache, HEAD_STRIDE)
            _write_row(cache, start, head, slot - index * block_size, row, row + 4 * padded(dim))
    keep(memory)


@kept(nogil=True)
def write_blocks(
    source: int, source_kind: int, row_stride: int, source_head_stride: int, cache: int, blocks: int, sources: int,
    num_blocks: int, num_heads: int,
) -> None:  # fmt: skip
    """Quantize whole blocks: token t of block blocks[i] is row sources[i, t]."""
    dim, block_size, by_channel = get(cache, DIM), get(cache, BLOCK_SIZE), get(cache, KIND) == INT4_CHANNEL
    width = padded(dim)
    memory = np.empty((block_size + 3) * width, dtype=np.float32)
    rows = memory.ctypes.data
    buffer = rows + 4 * block_size * width
    for item in range(num_blocks * num_heads):
        i = item // num_heads
        head = item - i * num_heads
        block = get(cache, ADDRESS) + load_int64(blocks + 8 * i) * get(cache, BLOCK_STRIDE)
        block += head * get(cache, HEAD_STRIDE)
        for t in range(block_size):
            row = source + load_int64(sources + 8 * (i * block_size + t)) * row_stride + head * source_head_stride
            _row_into(row, source_kind, dim, rows + 4 * t * width)
            if not by_channel:
                _write_row(cache, block, head, t, rows + 4 * t * width, buffer)
        if by_channel:
            quantize_channels(rows, dim, block_size, buffer, block, block + get(cache, SCALES_AT))
    keep(memory)
