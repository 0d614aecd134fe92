"""Rows of quantized blocks as float32, in strips.

A row is dequantized on its way into the strip, but for a factor where one scale holds for all of it: the factor is as
well given to the row's score, or to its weight, which is one number instead of a row of them.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from hfpaged_kernels.cpu_bits import (
    LANES,
    VECTOR,
    clear_bytes,
    copy_bytes,
    load,
    load_bfloat16,
    load_one,
    load_one_bfloat16,
    padded,
    scratch,
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
    read_two_int4,
)
from hfpaged_kernels.cpu_math import add, multiply, splat
from hfpaged_kernels.cpu_records import DIM, GROUPS, KIND, SCALES_AT, STATIC, get


@njit(forceinline=True)
def has_factors(head: int) -> bool:
    """Whether rows of this head come with a factor each that is not yet in them."""
    kind = get(head, KIND)
    return is_quantized(kind) and kind < INT4


@njit(nogil=True)
def read_quantized(head: int, block: int, offset: int, run: int, target: int, factors: int) -> None:
    """Rows offset .. offset + run of one head of a block, as [run, padded(dim)] float32, and their factors."""
    kind, scales = get(head, KIND), block + get(head, SCALES_AT)
    if kind == INT4_CHANNEL:
        _read_channels(block, scales, get(head, DIM), offset, run, target)
    elif kind == INT4:
        _read_groups(block, scales, get(head, DIM), get(head, GROUPS), offset, run, target)
    else:
        _read_rows(block, kind, get(head, DIM), offset, run, target)
        _read_factors(scales, kind, get(head, STATIC), offset, run, factors)


@njit(nogil=True)
def scale_rows(rows: int, width: int, count: int, factors: int) -> None:
    """Give each row its factor."""
    for row in range(count):
        factor = splat(load_one(factors + 4 * row))
        for at in range(rows + 4 * row * width, rows + 4 * (row + 1) * width, VECTOR):
            store(at, multiply(load(at), factor))


@njit(nogil=True)
def _read_rows(block: int, kind: int, dim: int, offset: int, run: int, target: int) -> None:
    """Eight bits."""
    width = padded(dim)
    if width == dim:
        read_codes(block + offset * dim, kind, target, run * dim)
        return
    whole = dim // LANES * LANES
    for row in range(run):
        start, at = block + (offset + row) * dim, target + 4 * row * width
        read_codes(start, kind, at, whole)
        store(at + 4 * whole, load_last_codes(start + whole, kind, dim - whole))


@njit(nogil=True)
def _read_factors(scales: int, kind: int, static: int, offset: int, run: int, factors: int) -> None:
    unit = E4M3_UNIT if kind == E4M3 else 1.0
    if run == LANES:
        own = splat(load_one(static)) if static != 0 else load_bfloat16(scales + 2 * offset)
        store(factors, multiply(own, splat(unit)))
        return
    for row in range(run):
        scale = load_one(static) if static != 0 else load_one_bfloat16(scales + 2 * (offset + row))
        store_one(factors + 4 * row, scale * unit)


@njit(forceinline=True)
def _codes_at(row: int, column: int, dim: int) -> Any:
    """Sixteen of four bits."""
    if column + LANES <= dim:
        return load_codes(row + code_bytes(INT4, column), INT4)
    return load_last_codes(row + code_bytes(INT4, column), INT4, dim - column)


@njit(nogil=True)
def _read_groups(block: int, scales: int, dim: int, groups: int, offset: int, run: int, target: int) -> None:
    """Four bits, with a scale and a lowest value for each group of each row."""
    width, each = padded(dim), padded(dim) // groups
    for row in range(run):
        codes, at = block + (offset + row) * code_bytes(INT4, dim), target + 4 * row * width
        for group in range(groups):
            pair = scales + 4 * ((offset + row) * groups + group)
            scale, low = splat(load_one_bfloat16(pair)), splat(load_one_bfloat16(pair + 2))
            column, end = group * each, (group + 1) * each
            while column + 2 * LANES <= min(end, dim):
                read_two_int4(codes + code_bytes(INT4, column), at + 4 * column, scale, low, scale, low)
                column += 2 * LANES
            while column < end:
                store(at + 4 * column, add(multiply(_codes_at(codes, column, dim), scale), low))
                column += LANES
    _clear_padding(target, dim, run)


@njit(nogil=True)
def _clear_padding(rows: int, dim: int, run: int) -> None:
    width = padded(dim)
    if width > dim:
        for row in range(run):
            clear_bytes(rows + 4 * (row * width + dim), 4 * (width - dim))


@njit(forceinline=True)
def _bytes_at(source: int, column: int, dim: int) -> Any:
    if column + LANES <= dim:
        return load_bytes(source + column)
    buffer = scratch()
    copy_bytes(buffer, source + column, dim - column)
    return load_bytes(buffer)


@njit(forceinline=True)
def _steps_of(scales: int, dim: int) -> Any:
    """Step of the scales, lowest low, step of the lows, of the channels of a block."""
    steps = scales + 2 * dim
    return splat(load_one_bfloat16(steps)), splat(load_one_bfloat16(steps + 2)), splat(load_one_bfloat16(steps + 4))


@njit(nogil=True)
def _read_channels(block: int, scales: int, dim: int, offset: int, run: int, target: int) -> None:
    """Four bits, with a scale and a lowest value for each channel of the block."""
    width, row_bytes = padded(dim), code_bytes(INT4, dim)
    scale_step, base, low_step = _steps_of(scales, dim)
    column = 0
    while column + 2 * LANES <= dim:
        a = multiply(load_bytes(scales + column), scale_step)
        b = add(multiply(load_bytes(scales + dim + column), low_step), base)
        c = multiply(load_bytes(scales + column + LANES), scale_step)
        d = add(multiply(load_bytes(scales + dim + column + LANES), low_step), base)
        source = block + offset * row_bytes + code_bytes(INT4, column)
        for row in range(run):
            read_two_int4(source + row * row_bytes, target + 4 * (row * width + column), a, b, c, d)
        column += 2 * LANES
    while column < width:
        a = multiply(_bytes_at(scales, column, dim), scale_step)
        b = add(multiply(_bytes_at(scales + dim, column, dim), low_step), base)
        for row in range(run):
            codes = _codes_at(block + (offset + row) * row_bytes, column, dim)
            store(target + 4 * (row * width + column), add(multiply(codes, a), b))
        column += LANES
    _clear_padding(target, dim, run)
