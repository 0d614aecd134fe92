# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Device functions between numbers and the codes of an encoding: they see loaded values only, no pointers.

CODES says how a number is coded: "native" (not at all), "int8", "e4m3", "e5m2" or "int4". Numbers of eight bits are
made and read by arithmetic on bits, the same on every device: hardware without them loses nothing but time.
"""

import triton
import triton.language as tl

# The smallest scale that has an inverse, float32's smallest normal number.
SMALLEST = tl.constexpr(2.0**-126)
# float32 has no places behind the point from 2**23 on: adding this and taking it away rounds to nearest even.
ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def numbers_of(codes, CODES: tl.constexpr):
    """What codes [..] uint8 stand for, before any scale: float16 or float32, exactly. "native" is handed through."""
    if CODES == "native":
        numbers = codes
    elif CODES == "int8":
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif CODES == "int4":
        numbers = codes.to(tl.float32)
    elif CODES == "e5m2":
        # The upper half of a float16.
        numbers = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(CODES == "e4m3")
        # A float16 with the wrong bias, by 2**8. Subnormal numbers come right by the product as well.
        wide = codes.to(tl.uint16)
        biased = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
        numbers = tl.where((wide & 0x7F) == 0x7F, float("nan"), biased * 256.0).to(tl.float16)
    return numbers


@triton.jit
def codes_of(numbers, LARGEST: tl.constexpr, CODES: tl.constexpr):
    """uint8 codes of float32 numbers that are scaled already, those too large cut off; a NaN stays one or becomes 0."""
    lowest: tl.constexpr = 0.0 if CODES == "int4" else -LARGEST
    is_nan = numbers != numbers
    inside = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, numbers), lowest), LARGEST)
    if CODES == "e4m3":
        codes = _eight_bits(inside, is_nan, 3, 120, 14)
    elif CODES == "e5m2":
        codes = _eight_bits(inside, is_nan, 2, 112, 7)
    else:
        codes = ((inside + ROUNDER) - ROUNDER).to(tl.int32).to(tl.uint8)
    return codes


@triton.jit
def _eight_bits(x, is_nan, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SAME_STEP: tl.constexpr):
    """float32 of at most the largest number of the format, rounded to nearest even.

    BIAS is float32's less that of the format. Below the format's normal numbers its step is constant and equals that
    of float32 from 2**SAME_STEP on, where a sum is rounded as wanted.
    """
    shift: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> shift) & 1
    normal = (magnitude + ((1 << (shift - 1)) - 1) + odd - (BIAS << 23)) >> shift
    moved = magnitude.to(tl.float32, bitcast=True) + (1 << SAME_STEP) * 1.0
    subnormal = moved.to(tl.uint32, bitcast=True) - ((127 + SAME_STEP) << 23)
    code = tl.where(magnitude < ((BIAS + 1) << 23), subnormal, normal)
    return (tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def up(x):
    """float32 rounded to bfloat16 towards plus infinity: (as float32, its bits as uint16)."""
    bits = x.to(tl.uint32, bitcast=True)
    # Of a negative number what is cut off makes it larger, of others one more than what is cut off.
    upper = tl.where(bits >> 31 != 0, bits, bits + 0xFFFF) >> 16
    upper = tl.where(x != x, 0x7FC0, upper).to(tl.uint32)
    return (upper << 16).to(tl.float32, bitcast=True), upper.to(tl.uint16)


@triton.jit
def down(x):
    """float32 rounded to bfloat16 towards minus infinity: (as float32, its bits as uint16)."""
    negated, bits = up(-x)
    return -negated, (bits ^ 0x8000).to(tl.uint16)


@triton.jit
def inverse(scale):
    """1 / scale, rounded correctly; 0 where the scale is 0 or so small that this could be infinite."""
    return tl.where(scale < SMALLEST, 0.0, tl.div_rn(1.0, scale))


@triton.jit
def largest_of(x, AXIS: tl.constexpr):
    """The maximum along an axis, NaN where there is one: tl.max passes over it."""
    has_nan = tl.max((x != x).to(tl.int32), AXIS)
    return tl.where(has_nan != 0, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), AXIS))


@triton.jit
def smallest_of(x, AXIS: tl.constexpr):
    """The minimum along an axis, NaN where there is one."""
    return -largest_of(-x, AXIS)
