"""Sixteen float32 lanes as a numba type, and how the three native cache dtypes are read into it and written from it.

A function that is forced inline must call none that is large: numba compiles what it calls with the same flag.

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
FLOAT, INT, SHORT, HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.HalfType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
SHORTS, HALVES = ir.VectorType(SHORT, LANES), ir.VectorType(HALF, LANES)
FUSE = ("contract",)


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


def constant(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * LANES)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(order)), order))


def read(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, FLOATS), align=4)


def write(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, FLOATS), align=4)


def splat_of(builder: Any, address: Any) -> Any:
    """The float32 at `address` in all lanes."""
    return splat_value(builder, builder.load(pointer(builder, address, FLOAT), align=4))


def splat_value(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.Constant(INT, 0))
    return shuffle(builder, first, first, [0] * LANES)


def fuse(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=FUSE), c, flags=FUSE)


@emitter(lanes, types.int64)
def load(builder: Any, address: Any) -> Any:
    return read(builder, address)


@emitter(types.void, types.int64, lanes)
def store(builder: Any, address: Any, value: Any) -> None:
    write(builder, address, value)


@emitter(lanes, types.int64)
def load_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(builder.load(pointer(builder, address, SHORTS), align=2), INTS)
    return builder.bitcast(builder.shl(bits, constant(INTS, 16)), FLOATS)


@emitter(lanes, types.int64)
def load_float16(builder: Any, address: Any) -> Any:
    return builder.fpext(builder.load(pointer(builder, address, HALVES), align=2), FLOATS)


@emitter(types.void, types.int64, lanes)
def store_bfloat16(builder: Any, address: Any, value: Any) -> None:
    """Rounds to nearest even; every NaN becomes the same quiet one, as in torch."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, constant(INTS, 16)), constant(INTS, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, constant(INTS, 0x7FFF)), odd), constant(INTS, 16))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), constant(INTS, 0x7FC0), rounded)
    builder.store(builder.trunc(chosen, SHORTS), pointer(builder, address, SHORTS), align=2)


@emitter(types.void, types.int64, lanes)
def store_float16(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.fptrunc(value, HALVES), pointer(builder, address, HALVES), align=2)


@emitter(types.float32, types.int64)
def load_one(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, FLOAT), align=4)


@emitter(types.float32, types.int64)
def load_one_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(builder.load(pointer(builder, address, SHORT), align=2), INT)
    return builder.bitcast(builder.shl(bits, ir.Constant(INT, 16)), FLOAT)


@emitter(types.void, types.int64, types.float32)
def store_one(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, FLOAT), align=4)


@emitter(types.int64, types.int64)
def load_int32(builder: Any, address: Any) -> Any:
    return builder.sext(builder.load(pointer(builder, address, INT), align=4), ir.IntType(64))


@emitter(types.int64, types.int64)
def load_int64(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, ir.IntType(64)), align=8)


@emitter(types.void, types.int64, types.int64)
def store_int64(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, ir.IntType(64)), align=8)


@emitter(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, target: Any, source: Any, count: Any) -> None:
    byte = ir.IntType(8)
    cgutils.raw_memcpy(builder, pointer(builder, target, byte), pointer(builder, source, byte), count, 1)


@emitter(types.void, types.int64, types.int64)
def clear_bytes(builder: Any, target: Any, count: Any) -> None:
    cgutils.memset(builder, pointer(builder, target, ir.IntType(8)), count, 0)


@emitter(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Ask for a cache line into the second level, for reading."""
    place = pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [place.type, INT, INT, INT])
    name = f"llvm.prefetch.{place.type.intrinsic_name}"
    hint = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(hint, [place, ir.Constant(INT, 0), ir.Constant(INT, 2), ir.Constant(INT, 1)])


@njit(forceinline=True)
def keep(array: Any) -> None:
    """numba frees an array after its last use, and does not see that its address is used."""
    array[0] = 0


@emitter(types.int64)
def scratch(builder: Any) -> Any:
    """The address of 64 bytes on the stack of the function that calls this; the same for all calls in it."""
    return builder.ptrtoint(cgutils.alloca_once(builder, FLOATS), ir.IntType(64))


@njit(forceinline=True)
def padded(dim: int) -> int:
    return (dim + LANES - 1) // LANES * LANES


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
