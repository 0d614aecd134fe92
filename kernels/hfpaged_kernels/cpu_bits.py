"""Sixteen float32 lanes as a numba type, and how the three cache dtypes are read into it and written from it.

Memory is addressed by plain integers, so that a kernel is compiled once and not once per dtype and layout.
LLVM splits the sixteen lanes into whatever registers the CPU has. Nothing here uses fast-math beyond the fusing
of a product and a sum: minus infinity and NaN behave as in torch.
"""

from __future__ import annotations

import inspect
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
# Bytes of sixteen lanes.
VECTOR = 4 * LANES
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
# What a row has seen before its first key. Finite, so that "minus infinity minus the maximum" is never NaN.
NOTHING = -1e30

_FLOAT, _INT, _SHORT, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.HalfType()
FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_SHORTS, _HALVES = ir.VectorType(_SHORT, LANES), ir.VectorType(_HALF, LANES)
_FUSE = ("contract",)


class Lanes(types.Type):  # type: ignore[misc, unused-ignore]
    """Sixteen float32 in one value."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc, unused-ignore]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, FLOATS)


def emitter(result: Any, *arguments: Any) -> Any:
    """A numba intrinsic of fixed types from `emit(builder, *values)`; its name and docstring stay."""

    def decorate(emit: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            made = emit(builder, *values)
            return context.get_dummy_value() if made is None else made

        def typing(*_: Any) -> Any:
            return result(*arguments), codegen

        # numba reads the number of arguments from the signature of the typing function.
        typing.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        typing.__name__, typing.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typing)

    return decorate


def _constant(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * LANES)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(order)), order))


def read(builder: Any, address: Any) -> Any:
    return builder.load(_at(builder, address, FLOATS), align=4)


def write(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _at(builder, address, FLOATS), align=4)


def splat_of(builder: Any, address: Any) -> Any:
    """The float32 at `address` in all lanes."""
    return _splat(builder, builder.load(_at(builder, address, _FLOAT), align=4))


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return shuffle(builder, first, first, [0] * LANES)


def fuse(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two; b where either is NaN, which is what one x86 instruction does."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emitter(lanes, types.int64)
def load(builder: Any, address: Any) -> Any:
    return read(builder, address)


@emitter(types.void, types.int64, lanes)
def store(builder: Any, address: Any, value: Any) -> None:
    write(builder, address, value)


@emitter(lanes, types.int64)
def load_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(builder.load(_at(builder, address, _SHORTS), align=2), _INTS)
    return builder.bitcast(builder.shl(bits, _constant(_INTS, 16)), FLOATS)


@emitter(lanes, types.int64)
def load_float16(builder: Any, address: Any) -> Any:
    return builder.fpext(builder.load(_at(builder, address, _HALVES), align=2), FLOATS)


@emitter(types.void, types.int64, lanes)
def store_bfloat16(builder: Any, address: Any, value: Any) -> None:
    """Rounds to nearest even; every NaN becomes the same quiet one, as in torch."""
    bits = builder.bitcast(value, _INTS)
    odd = builder.and_(builder.lshr(bits, _constant(_INTS, 16)), _constant(_INTS, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, _constant(_INTS, 0x7FFF)), odd), _constant(_INTS, 16))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), _constant(_INTS, 0x7FC0), rounded)
    builder.store(builder.trunc(chosen, _SHORTS), _at(builder, address, _SHORTS), align=2)


@emitter(types.void, types.int64, lanes)
def store_float16(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.fptrunc(value, _HALVES), _at(builder, address, _HALVES), align=2)


@emitter(types.float32, types.int64)
def load_one(builder: Any, address: Any) -> Any:
    return builder.load(_at(builder, address, _FLOAT), align=4)


@emitter(types.void, types.int64, types.float32)
def store_one(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _at(builder, address, _FLOAT), align=4)


@emitter(types.int64, types.int64)
def load_int32(builder: Any, address: Any) -> Any:
    return builder.sext(builder.load(_at(builder, address, _INT), align=4), ir.IntType(64))


@emitter(types.int64, types.int64)
def load_int64(builder: Any, address: Any) -> Any:
    return builder.load(_at(builder, address, ir.IntType(64)), align=8)


@emitter(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, target: Any, source: Any, count: Any) -> None:
    byte = ir.IntType(8)
    cgutils.raw_memcpy(builder, _at(builder, target, byte), _at(builder, source, byte), count, 1)


@emitter(types.void, types.int64, types.int64)
def clear_bytes(builder: Any, target: Any, count: Any) -> None:
    cgutils.memset(builder, _at(builder, target, ir.IntType(8)), count, 0)


@emitter(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Ask for a cache line into the second level, for reading."""
    pointer = _at(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
    name = f"llvm.prefetch.{pointer.type.intrinsic_name}"
    hint = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(hint, [pointer, ir.Constant(_INT, 0), ir.Constant(_INT, 2), ir.Constant(_INT, 1)])


@emitter(lanes, types.float32)
def splat(builder: Any, value: Any) -> Any:
    return _splat(builder, value)


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


def _fold(builder: Any, value: Any, combine: Any) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        order = [(i + width) % LANES for i in range(LANES)]
        value = combine(builder, value, shuffle(builder, value, value, order))
    return builder.extract_element(value, ir.Constant(_INT, 0))


@emitter(types.float32, lanes)
def total(builder: Any, value: Any) -> Any:
    return _fold(builder, value, lambda b, x, y: b.fadd(x, y))


@emitter(types.float32, lanes)
def largest(builder: Any, value: Any) -> Any:
    return _fold(builder, value, _larger)


@emitter(lanes, lanes)
def exp(builder: Any, x: Any) -> Any:
    """e to the x, relative error below 3e-7; 0 below -87, bounded above 88, NaN for NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2; a polynomial gives e to the r, and n goes into the exponent's bits.
    Adding 1.5 * 2**23 leaves n, rounded, in the low bits of the sum: no conversion that NaN could upset.
    """
    low, high = _constant(FLOATS, -87.0), _constant(FLOATS, 88.0)
    tiny = builder.fcmp_ordered("<", x, low)
    x = builder.select(tiny, low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    magic = _constant(FLOATS, 12582912.0)
    shifted = builder.fadd(builder.fmul(x, _constant(FLOATS, 1.4426950408889634)), magic)
    n = builder.fsub(shifted, magic)
    r = fuse(builder, n, _constant(FLOATS, -0.693145751953125), x)
    r = fuse(builder, n, _constant(FLOATS, -1.428606765330187e-06), r)
    series = _constant(FLOATS, 1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        series = fuse(builder, series, r, _constant(FLOATS, coefficient))
    exponent = builder.shl(builder.bitcast(shifted, _INTS), _constant(_INTS, 23))
    scaled = builder.bitcast(builder.add(builder.bitcast(series, _INTS), exponent), FLOATS)
    return builder.select(tiny, _constant(FLOATS, 0.0), scaled)


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


@njit(forceinline=True)
def keep(array: Any) -> None:
    """numba frees an array after its last use, and does not see that its address is used."""
    array[0] = 0


@emitter(types.int64)
def scratch(builder: Any) -> Any:
    """The address of 64 bytes on the stack of the function that calls this; the same for all calls in it."""
    return builder.ptrtoint(cgutils.alloca_once(builder, FLOATS), ir.IntType(64))


@njit(forceinline=True)
def size_of(kind: int) -> int:
    return 4 if kind == FLOAT32 else 2


@njit(forceinline=True)
def load_as(address: int, kind: int) -> Any:
    if kind == FLOAT32:
        return load(address)
    if kind == BFLOAT16:
        return load_bfloat16(address)
    return load_float16(address)


@njit(forceinline=True)
def store_as(address: int, kind: int, value: Any) -> None:
    if kind == FLOAT32:
        store(address, value)
    elif kind == BFLOAT16:
        store_bfloat16(address, value)
    else:
        store_float16(address, value)


@njit(nogil=True)
def convert(source: int, source_kind: int, target: int, target_kind: int, count: int) -> None:
    """Copy `count` elements from one dtype to another."""
    source_size, target_size = size_of(source_kind), size_of(target_kind)
    if source_kind == target_kind:
        copy_bytes(target, source, count * source_size)
        return
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        store_as(target + i * target_size, target_kind, load_as(source + i * source_size, source_kind))
    if whole < count:
        buffer = scratch()
        copy_bytes(buffer, source + whole * source_size, (count - whole) * source_size)
        store_as(buffer, target_kind, load_as(buffer, source_kind))
        copy_bytes(target + whole * target_size, buffer, (count - whole) * target_size)
