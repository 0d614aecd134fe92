"""Codes of eight and of four bits, sixteen at a time: read as float32, and made from float32 that is in range already.

What these numbers are worth is left to their scales, which `cpu_strips` and `cpu_quantizing` know.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from hfpaged_kernels.cpu_bits import (
    FLOATS,
    HALVES,
    INTS,
    LANES,
    SHORTS,
    clear_bytes,
    constant,
    copy_bytes,
    emitter,
    lanes,
    pointer,
    scratch,
    shuffle,
    store,
)

INT8, E4M3, E5M2, INT4, INT4_CHANNEL = 3, 4, 5, 6, 7
# What the codes of e4m3, read as below, must still be multiplied by: its exponents are those of float16 less eight.
E4M3_UNIT = 256.0

_BYTE = ir.IntType(8)
_BYTES, _EIGHT = ir.VectorType(_BYTE, LANES), ir.VectorType(_BYTE, LANES // 2)
_EIGHT_SHORTS = ir.VectorType(ir.IntType(16), LANES // 2)
# Added to a float32 below 2 to the 22, it rounds to whole numbers, to even in the middle, and leaves them in the low
# bits.
_ROUNDING = 12582912.0


@njit(forceinline=True)
def is_quantized(kind: int) -> bool:
    return kind >= INT8


@njit(forceinline=True)
def code_bytes(kind: int, dim: int) -> int:
    """Of one row."""
    return dim // 2 if kind >= INT4 else dim


def _eights(value: int, count: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(_BYTE, count), [value] * count)


@emitter(lanes, types.int64)
def _load_int8(builder: Any, address: Any) -> Any:
    return builder.sitofp(builder.sext(builder.load(pointer(builder, address, _BYTES), align=1), INTS), FLOATS)


@emitter(lanes, types.int64)
def load_bytes(builder: Any, address: Any) -> Any:
    return builder.uitofp(builder.zext(builder.load(pointer(builder, address, _BYTES), align=1), INTS), FLOATS)


@emitter(lanes, types.int64)
def _load_e4m3(builder: Any, address: Any) -> Any:
    """The bits are those of a float16 (sign, four of its five bits of exponent, mantissa) but for the NaNs."""
    codes = builder.load(pointer(builder, address, _BYTES), align=1)
    bits = builder.and_(builder.shl(builder.sext(codes, SHORTS), constant(SHORTS, 7)), constant(SHORTS, 0xBFFF))
    is_nan = builder.icmp_unsigned("==", builder.and_(codes, _eights(0x7F)), _eights(0x7F))
    bits = builder.select(is_nan, constant(SHORTS, 0x7E00), bits)
    return builder.fpext(builder.bitcast(bits, HALVES), FLOATS)


@emitter(lanes, types.int64)
def _load_e5m2(builder: Any, address: Any) -> Any:
    """The upper byte of a float16."""
    codes = builder.zext(builder.load(pointer(builder, address, _BYTES), align=1), SHORTS)
    return builder.fpext(builder.bitcast(builder.shl(codes, constant(SHORTS, 8)), HALVES), FLOATS)


@emitter(lanes, types.int64)
def _load_int4(builder: Any, address: Any) -> Any:
    """Eight bytes: the low half of each, then its high half."""
    pairs = builder.zext(builder.load(pointer(builder, address, _EIGHT), align=1), _EIGHT_SHORTS)
    fours = ir.Constant(_EIGHT_SHORTS, [4] * (LANES // 2))
    apart = builder.bitcast(builder.or_(pairs, builder.shl(pairs, fours)), _BYTES)
    codes = builder.and_(apart, _eights(15))
    return builder.uitofp(builder.zext(codes, INTS), FLOATS)


@njit(forceinline=True)
def load_codes(address: int, kind: int) -> Any:
    if kind == INT8:
        return _load_int8(address)
    if kind == E4M3:
        return _load_e4m3(address)
    if kind == E5M2:
        return _load_e5m2(address)
    return _load_int4(address)


@njit(forceinline=True)
def load_last_codes(address: int, kind: int, count: int) -> Any:
    """Fewer than sixteen; the other lanes hold zeros."""
    buffer = scratch()
    clear_bytes(buffer, LANES)
    copy_bytes(buffer, address, code_bytes(kind, count))
    return load_codes(buffer, kind)


@njit(nogil=True)
def read_codes(source: int, kind: int, target: int, count: int) -> None:
    """`count` codes, whole lanes' worth, as float32."""
    if kind == INT8:
        for i in range(0, count, LANES):
            store(target + 4 * i, _load_int8(source + i))
    elif kind == E4M3:
        for i in range(0, count, LANES):
            store(target + 4 * i, _load_e4m3(source + i))
    elif kind == E5M2:
        for i in range(0, count, LANES):
            store(target + 4 * i, _load_e5m2(source + i))
    else:
        for i in range(0, count, LANES):
            store(target + 4 * i, _load_int4(source + i // 2))


@emitter(types.void, types.int64, lanes)
def store_whole(builder: Any, address: Any, value: Any) -> None:
    """Rounded to the nearest whole number, which fits into eight bits; 0 for NaN."""
    number = builder.select(builder.fcmp_ordered("ord", value, value), value, constant(FLOATS, 0.0))
    bits = builder.bitcast(builder.fadd(number, constant(FLOATS, _ROUNDING)), INTS)
    builder.store(builder.trunc(bits, _BYTES), pointer(builder, address, _BYTES), align=1)


def _store_fp8_of(mantissa: int, bias: int) -> Any:
    """float32, in range or NaN, rounded to so many bits of mantissa, to even in the middle."""
    dropped = 23 - mantissa
    # The smallest normal number, and what has the smallest subnormal one as its last bit.
    smallest, subnormal = 2.0 ** (1 - bias), 2.0 ** (23 + 1 - bias - mantissa)

    @emitter(types.void, types.int64, lanes)
    def store_fp8(builder: Any, address: Any, value: Any) -> None:
        def bits_of(x: Any) -> Any:
            return builder.bitcast(x, INTS)

        signed = bits_of(value)
        bits = builder.and_(signed, constant(INTS, 0x7FFFFFFF))
        sign = builder.and_(builder.lshr(signed, constant(INTS, 24)), constant(INTS, 0x80))
        size = builder.bitcast(bits, FLOATS)
        odd = builder.and_(builder.lshr(bits, constant(INTS, dropped)), constant(INTS, 1))
        rounded = builder.add(builder.add(bits, constant(INTS, (1 << dropped - 1) - 1)), odd)
        normal = builder.sub(builder.lshr(rounded, constant(INTS, dropped)), constant(INTS, (127 - bias) << mantissa))
        added = bits_of(builder.fadd(size, constant(FLOATS, subnormal)))
        small = builder.sub(added, bits_of(constant(FLOATS, subnormal)))
        code = builder.select(builder.fcmp_ordered("<", size, constant(FLOATS, smallest)), small, normal)
        code = builder.select(builder.fcmp_unordered("uno", value, value), constant(INTS, 0x7F), code)
        code = builder.trunc(builder.or_(code, sign), _BYTES)
        builder.store(code, pointer(builder, address, _BYTES), align=1)

    return store_fp8


_store_e4m3, _store_e5m2 = _store_fp8_of(3, 7), _store_fp8_of(2, 15)


@njit(forceinline=True)
def store_codes(address: int, kind: int, value: Any) -> None:
    """Sixteen bytes, also where the codes have four bits: see `pack`."""
    if kind == E4M3:
        _store_e4m3(address, value)
    elif kind == E5M2:
        _store_e5m2(address, value)
    else:
        store_whole(address, value)


@emitter(types.void, types.int64, types.int64)
def pack(builder: Any, source: Any, target: Any) -> None:
    """Sixteen bytes below 16 become eight."""
    codes = builder.load(pointer(builder, source, _BYTES), align=1)
    low = shuffle(builder, codes, codes, list(range(0, LANES, 2)))
    high = shuffle(builder, codes, codes, list(range(1, LANES, 2)))
    pairs = builder.or_(low, builder.shl(high, _eights(4, LANES // 2)))
    builder.store(pairs, pointer(builder, target, _EIGHT), align=1)
