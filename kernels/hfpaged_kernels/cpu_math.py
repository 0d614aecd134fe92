"""Arithmetic of sixteen lanes. Nothing here uses fast-math beyond the fusing of a product and a sum: minus infinity
and NaN behave as in torch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from hfpaged_kernels.cpu_bits import FLOATS, INT, INTS, LANES, constant, emitter, fuse, lanes, shuffle, splat_value

# What a row has seen before its first key. Finite, so that "minus infinity minus the maximum" is never NaN.
NOTHING = -1e30


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two; b where either is NaN, which is what one x86 instruction does."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emitter(lanes, types.float32)
def splat(builder: Any, value: Any) -> Any:
    return splat_value(builder, value)


@emitter(lanes, lanes, lanes)
def add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@emitter(lanes, lanes, lanes)
def subtract(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@emitter(lanes, lanes, lanes)
def multiply(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@emitter(lanes, lanes, lanes)
def divide(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@emitter(lanes, lanes, lanes, lanes)
def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""
    return fuse(builder, a, b, c)


@emitter(lanes, lanes, lanes)
def larger(builder: Any, a: Any, b: Any) -> Any:
    return _larger(builder, a, b)


@emitter(lanes, lanes, lanes, lanes, lanes)
def where_at_most(builder: Any, a: Any, b: Any, chosen: Any, otherwise: Any) -> Any:
    """`chosen` in the lanes where a <= b."""
    return builder.select(builder.fcmp_ordered("<=", a, b), chosen, otherwise)


@emitter(lanes)
def lane_numbers(builder: Any) -> Any:
    return ir.Constant(FLOATS, [float(i) for i in range(LANES)])


def fold(builder: Any, value: Any, combine: Any) -> Any:
    """All lanes into one, which is in all lanes then."""
    width = LANES
    while width > 1:
        width //= 2
        order = [(i + width) % LANES for i in range(LANES)]
        value = combine(builder, value, shuffle(builder, value, value, order))
    return value


def _first(builder: Any, value: Any) -> Any:
    return builder.extract_element(value, ir.Constant(INT, 0))


@emitter(types.float32, lanes)
def total(builder: Any, value: Any) -> Any:
    return _first(builder, fold(builder, value, lambda b, x, y: b.fadd(x, y)))


@emitter(types.float32, lanes)
def largest(builder: Any, value: Any) -> Any:
    return _first(builder, fold(builder, value, _larger))


@emitter(lanes, lanes)
def exp(builder: Any, x: Any) -> Any:
    """e to the x, relative error below 3e-7; 0 below -87, bounded above 88, NaN for NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2; a polynomial gives e to the r, and n goes into the exponent's bits.
    Adding 1.5 * 2**23 leaves n, rounded, in the low bits of the sum: no conversion that NaN could upset.
    """
    low, high = constant(FLOATS, -87.0), constant(FLOATS, 88.0)
    tiny = builder.fcmp_ordered("<", x, low)
    x = builder.select(tiny, low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    magic = constant(FLOATS, 12582912.0)
    shifted = builder.fadd(builder.fmul(x, constant(FLOATS, 1.4426950408889634)), magic)
    n = builder.fsub(shifted, magic)
    r = fuse(builder, n, constant(FLOATS, -0.693145751953125), x)
    r = fuse(builder, n, constant(FLOATS, -1.428606765330187e-06), r)
    series = constant(FLOATS, 1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        series = fuse(builder, series, r, constant(FLOATS, coefficient))
    exponent = builder.shl(builder.bitcast(shifted, INTS), constant(INTS, 23))
    scaled = builder.bitcast(builder.add(builder.bitcast(series, INTS), exponent), FLOATS)
    return builder.select(tiny, constant(FLOATS, 0.0), scaled)


@njit(forceinline=True)
def tanh(x: Any) -> Any:
    """Relative error below 4e-7; the series serves small x, where the quotient would lose digits."""
    one = splat(1.0)
    quotient = subtract(one, divide(splat(2.0), add(exp(add(x, x)), one)))
    square = multiply(x, x)
    series = splat(62 / 2835)
    for coefficient in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        series = fused(series, square, splat(coefficient))
    return where_at_most(square, splat(0.09), multiply(series, x), quotient)
