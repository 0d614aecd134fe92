"""Quantizing on CPU with a scale and a lowest value for each channel of a block."""

from __future__ import annotations

import numpy as np
from numba import njit

from hfpaged_kernels.cpu_bits import (
    LANES,
    VECTOR,
    copy_bytes,
    load,
    padded,
    store,
)
from hfpaged_kernels.cpu_codes import INT4, INT4_CHANNEL, INT8, code_bytes, pack, store_codes
from hfpaged_kernels.cpu_math import add, multiply, splat, subtract
from hfpaged_kernels.cpu_rounding import (
    ceiling,
    clamp,
    down,
    floor,
    greatest,
    greatest_of,
    inverse_of,
    least,
    least_of,
    store_one_bfloat16,
    up,
    zero_for_nan,
)


@njit(nogil=True)
def write_codes(codes: int, kind: int, dim: int, target: int) -> None:
    """`codes`, one to a byte, into the cache; their buffer is used up."""
    if kind >= INT4:
        for column in range(0, padded(dim), LANES):
            pack(codes + column, codes + column // 2)
    copy_bytes(target, codes, code_bytes(kind, dim))


@njit(nogil=True)
def _extremes(rows: int, block_size: int, width: int, lowest: int, highest: int) -> None:
    """Of each channel of a block."""
    for column in range(0, 4 * width, VECTOR):
        low = high = load(rows + column)
        for row in range(1, block_size):
            value = load(rows + 4 * row * width + column)
            low, high = least(low, value), greatest(high, value)
        store(lowest + column, low)
        store(highest + column, high)


@njit(nogil=True)
def _code_lows(lowest: int, dim: int, codes: int, steps: int) -> None:
    """The lows of the channels in eight bits; `lowest` becomes what the codes say."""
    width = padded(dim)
    low = high = load(lowest)
    for at in range(lowest, lowest + 4 * width, VECTOR):
        low, high = least(low, load(at)), greatest(high, load(at))
    base = down(least_of(low))
    step = up(multiply(subtract(greatest_of(high), base), splat(1 / 255)))
    store_one_bfloat16(steps + 2, base)
    store_one_bfloat16(steps + 4, step)
    inverse = inverse_of(step)
    for column in range(0, width, LANES):
        at = lowest + 4 * column
        code = zero_for_nan(floor(multiply(subtract(load(at), base), inverse)))
        code = clamp(code, splat(0.0), splat(255.0))
        store_codes(codes + column, INT8, code)
        store(at, add(multiply(code, step), base))


@njit(nogil=True)
def _code_scales(lowest: int, highest: int, dim: int, codes: int, steps: int) -> None:
    """The scales of the channels in eight bits; `highest` becomes the inverses of what the codes say."""
    width = padded(dim)
    top = splat(-np.inf)
    for column in range(0, 4 * width, VECTOR):
        scale = multiply(subtract(load(highest + column), load(lowest + column)), splat(1 / 15))
        store(highest + column, scale)
        top = greatest(top, scale)
    step = up(multiply(greatest_of(top), splat(1 / 255)))
    store_one_bfloat16(steps, step)
    inverse = inverse_of(step)
    for column in range(0, width, LANES):
        at = highest + 4 * column
        code = clamp(zero_for_nan(ceiling(multiply(load(at), inverse))), splat(0.0), splat(255.0))
        store_codes(codes + column, INT8, code)
        store(at, inverse_of(multiply(code, step)))


@njit(nogil=True)
def quantize_channels(rows: int, dim: int, block_size: int, buffer: int, target: int, scales: int) -> None:
    """Four bits, and for each channel of the block a scale and a lowest value, in eight bits each."""
    width, row_bytes = padded(dim), code_bytes(INT4_CHANNEL, dim)
    lowest, inverses, codes = buffer, buffer + 4 * width, buffer + 8 * width
    steps = scales + 2 * dim
    _extremes(rows, block_size, width, lowest, inverses)
    _code_lows(lowest, dim, codes, steps)
    copy_bytes(scales + dim, codes, dim)
    _code_scales(lowest, inverses, dim, codes, steps)
    copy_bytes(scales, codes, dim)
    store_one_bfloat16(steps + 6, splat(0.0))
    for row in range(block_size):
        for column in range(0, width, LANES):
            at = 4 * column
            scaled = multiply(subtract(load(rows + 4 * row * width + at), load(lowest + at)), load(inverses + at))
            store_codes(codes + column, INT4, clamp(scaled, splat(0.0), splat(15.0)))
        write_codes(codes, INT4, dim, target + row * row_bytes)
