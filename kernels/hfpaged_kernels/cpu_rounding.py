"""What quantizing needs of arithmetic: rounding, and least and greatest numbers that are NaN if one of them is."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from hfpaged_kernels.cpu_bits import FLOATS, INT, INTS, LANES, SHORT, constant, emitter, lanes, pointer
from hfpaged_kernels.cpu_math import fold

# Below it, the smallest normal number, a scale counts as zero: see `quantizing`.
_SMALLEST = 2.0**-126


def _is_nan(builder: Any, x: Any) -> Any:
    return builder.fcmp_unordered("uno", x, x)


def _more(sign: str) -> Any:
    def choose(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.or_(builder.fcmp_ordered(sign, a, b), _is_nan(builder, a)), a, b)

    return choose


_greatest, _least = _more(">"), _more("<")


@emitter(lanes, lanes, lanes)
def greatest(builder: Any, a: Any, b: Any) -> Any:
    return _greatest(builder, a, b)


@emitter(lanes, lanes, lanes)
def least(builder: Any, a: Any, b: Any) -> Any:
    return _least(builder, a, b)


@emitter(lanes, lanes)
def greatest_of(builder: Any, value: Any) -> Any:
    """That of all lanes, in all lanes."""
    return fold(builder, value, _greatest)


@emitter(lanes, lanes)
def least_of(builder: Any, value: Any) -> Any:
    """That of all lanes, in all lanes."""
    return fold(builder, value, _least)


@emitter(lanes, lanes)
def size(builder: Any, value: Any) -> Any:
    bits = builder.and_(builder.bitcast(value, INTS), constant(INTS, 0x7FFFFFFF))
    return builder.bitcast(bits, FLOATS)


def _negative(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.xor(builder.bitcast(value, INTS), constant(INTS, -(2**31))), FLOATS)


def _up(builder: Any, value: Any) -> Any:
    """As a bfloat16 is the upper half of a float32: away from zero if positive, else towards it."""
    bits = builder.bitcast(value, INTS)
    positive = builder.icmp_signed(">=", bits, constant(INTS, 0))
    raised = builder.select(positive, builder.add(bits, constant(INTS, 0xFFFF)), bits)
    cut = builder.and_(raised, constant(INTS, -(2**16)))
    return builder.bitcast(builder.select(_is_nan(builder, value), constant(INTS, 0x7FC00000), cut), FLOATS)


@emitter(lanes, lanes)
def up(builder: Any, value: Any) -> Any:
    """Rounded to bfloat16 towards plus infinity."""
    return _up(builder, value)


@emitter(lanes, lanes)
def down(builder: Any, value: Any) -> Any:
    """Rounded to bfloat16 towards minus infinity."""
    return _negative(builder, _up(builder, _negative(builder, value)))


@emitter(lanes, lanes)
def inverse_of(builder: Any, scale: Any) -> Any:
    """1 / scale, 0 where that could be infinite."""
    small = builder.fcmp_ordered("<", scale, constant(FLOATS, _SMALLEST))
    return builder.select(small, constant(FLOATS, 0.0), builder.fdiv(constant(FLOATS, 1.0), scale))


@emitter(lanes, lanes, lanes, lanes)
def clamp(builder: Any, value: Any, low: Any, high: Any) -> Any:
    """NaN stays."""
    value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    return builder.select(builder.fcmp_ordered(">", value, high), high, value)


@emitter(lanes, lanes)
def zero_for_nan(builder: Any, value: Any) -> Any:
    return builder.select(_is_nan(builder, value), constant(FLOATS, 0.0), value)


def _rounding(name: str) -> Any:
    @emitter(lanes, lanes)
    def rounded(builder: Any, value: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
        return builder.call(function, [value])

    return rounded


floor, ceiling = _rounding("floor"), _rounding("ceil")


@emitter(types.void, types.int64, lanes)
def store_one_bfloat16(builder: Any, address: Any, value: Any) -> None:
    """The first lane, which is a bfloat16 already."""
    bits = builder.extract_element(builder.bitcast(value, INTS), ir.Constant(INT, 0))
    short = builder.trunc(builder.lshr(bits, ir.Constant(INT, 16)), SHORT)
    builder.store(short, pointer(builder, address, SHORT), align=2)
