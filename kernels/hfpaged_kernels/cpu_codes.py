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
    SHORT,
    clear_bytes,
    constant,
    copy_bytes,
    emitter,
    lanes,
    pointer,
    scratch,
    shuffle,
    store,
    write,
)

INT8, E4M3, E5M2, INT4, INT4_CHANNEL = 3, 4, 5, 6, 7
# What the codes of e4m3, read as below, must still be multiplied by: its exponents are those of float16 less eight.
E4M3_UNIT = 256.0

_BYTE = ir.IntType(8)
_BYTES, _EIGHT = ir.VectorType(_BYTE, LANES), ir.VectorType(_BYTE, LANES // 2)
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


def _halves(builder: Any, bits: Any, start: int) -> Any:
    """Sixteen from `start` on, of float16 in a wider vector of their bits, as float32."""
    own = shuffle(builder, bits, bits, list(range(start, start + LANES)))
    return builder.fpext(builder.bitcast(own, HALVES), FLOATS)


def _e4m3_bits(builder: Any, codes: Any, count: int) -> Any:
    """float16 with the sign, the mantissa and four of five bits of the exponent; 0x7F and 0xFF, where a carry runs
    through all of them, become NaNs.
    """
    wide = ir.VectorType(SHORT, count)

    def every(value: int) -> Any:
        return ir.Constant(wide, [value] * count)

    bits = builder.and_(builder.shl(builder.sext(codes, wide), every(7)), every(0xBFFF))
    carry = builder.and_(builder.add(bits, every(0x80)), every(0x4000))
    return builder.or_(bits, carry)


def _e5m2_bits(builder: Any, codes: Any, count: int) -> Any:
    """The codes are the upper bytes of float16."""
    wide = ir.VectorType(SHORT, count)
    return builder.shl(builder.zext(codes, wide), ir.Constant(wide, [8] * count))


def _nibbles(builder: Any, pairs: Any, count: int) -> Any:
    """Of so many bytes, the low half and the high half of each, as bytes."""
    wide = ir.VectorType(SHORT, count)
    pairs = builder.zext(pairs, wide)
    apart = builder.or_(pairs, builder.shl(pairs, ir.Constant(wide, [4] * count)))
    return builder.and_(builder.bitcast(apart, ir.VectorType(_BYTE, 2 * count)), _eights(15, 2 * count))


def _whole(builder: Any, codes: Any, start: int) -> Any:
    """Sixteen from `start` on, of bytes, as float32."""
    own = shuffle(builder, codes, codes, list(range(start, start + LANES)))
    return builder.uitofp(builder.zext(own, INTS), FLOATS)


def _bytes_at(builder: Any, address: Any, count: int) -> Any:
    return builder.load(pointer(builder, address, ir.VectorType(_BYTE, count)), align=1)


@emitter(lanes, types.int64)
def _load_e4m3(builder: Any, address: Any) -> Any:
    return _halves(builder, _e4m3_bits(builder, _bytes_at(builder, address, LANES), LANES), 0)


@emitter(lanes, types.int64)
def _load_e5m2(builder: Any, address: Any) -> Any:
    return _halves(builder, _e5m2_bits(builder, _bytes_at(builder, address, LANES), LANES), 0)


@emitter(lanes, types.int64)
def _load_int4(builder: Any, address: Any) -> Any:
    return _whole(builder, _nibbles(builder, _bytes_at(builder, address, LANES // 2), LANES // 2), 0)


def _read_halves_of(bits_of: Any) -> Any:
    """Twice sixteen at once, so that what comes before float32 fills a vector."""

    @emitter(types.void, types.int64, types.int64)
    def read(builder: Any, source: Any, target: Any) -> None:
        bits = bits_of(builder, _bytes_at(builder, source, 2 * LANES), 2 * LANES)
        for part in (0, LANES):
            write(builder, builder.add(target, ir.Constant(ir.IntType(64), 4 * part)), _halves(builder, bits, part))

    return read


_read_two_e4m3, _read_two_e5m2 = _read_halves_of(_e4m3_bits), _read_halves_of(_e5m2_bits)


@emitter(types.void, types.int64, types.int64, lanes, lanes, lanes, lanes)
def read_two_int4(builder: Any, source: Any, target: Any, scale: Any, low: Any, next_scale: Any, next_low: Any) -> None:
    """Twice sixteen of four bits, times their scales, plus their lows."""
    codes = _nibbles(builder, _bytes_at(builder, source, LANES), LANES)
    for part, own, lowest in ((0, scale, low), (LANES, next_scale, next_low)):
        value = builder.fadd(builder.fmul(_whole(builder, codes, part), own), lowest)
        write(builder, builder.add(target, ir.Constant(ir.IntType(64), 4 * part)), value)


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
    """`count` codes of eight bits, whole lanes' worth, as float32."""
    if kind == INT8:
        for i in range(0, count, LANES):
            store(target + 4 * i, _load_int8(source + i))
        return
    pairs = count // (2 * LANES) * (2 * LANES)
    if kind == E4M3:
        for i in range(0, pairs, 2 * LANES):
            _read_two_e4m3(source + i, target + 4 * i)
    else:
        for i in range(0, pairs, 2 * LANES):
            _read_two_e5m2(source + i, target + 4 * i)
    if pairs < count:
        store(target + 4 * pairs, load_codes(source + pairs, kind))


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
