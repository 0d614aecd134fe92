"""Keys and values as the Triton kernels take them: pointers, strides and constants of a cache, plain or quantized."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import Cache, QuantizedCache, data_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# How the kernels call the codes of an encoding.
CODES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "int4"}
WORDS = (torch.int64, torch.int32, torch.int16)


def pad(dim: int) -> int:
    """The power of two, 16 or more, that a kernel works with in place of `dim`."""
    return max(16, triton.next_power_of_2(dim))


def dims(name: str, dim: int) -> dict[str, int]:
    """The constants <NAME>_DIM and <NAME>_PAD."""
    return {f"{name}_DIM": dim, f"{name}_PAD": pad(dim)}


def part_arguments(cache: Cache, name: str = "") -> dict[str, Any]:
    """Where a part lies and how it is coded; the arguments begin with `name`, "key_" or "value_"."""
    data, upper = data_of(cache), name.upper()
    slot_stride, scales, codes, scales_of, groups = data.stride(2), None, "native", "", 1
    if isinstance(cache, QuantizedCache):
        encoding = cache.encoding
        slot_stride, scales = encoding.row_bytes(cache.dim), cache.scales
        codes, scales_of, groups = CODES[encoding.dtype], encoding.scales, encoding.groups(cache.dim)
    return {
        f"{name}cache_ptr": data,
        f"{name}scales_ptr": data if scales is None else scales,
        f"{name}block_stride": data.stride(0),
        f"{name}head_stride": data.stride(1),
        f"{name}slot_stride": slot_stride,
        f"{upper}DIM": cache.shape[3],
        f"{upper}PAD": pad(cache.shape[3]),
        f"{upper}CODES": codes,
        f"{upper}SCALES": scales_of,
        f"{upper}GROUPS": groups,
    }


def residual_arguments(cache: Cache, residuals: Tensor | None, name: str = "") -> dict[str, Any]:
    """Where the unfilled blocks of a part lie; no residual is looked at if `residuals` names none."""
    residual = cache.residual if isinstance(cache, QuantizedCache) and residuals is not None else None
    return {
        f"{name}residual_ptr": data_of(cache) if residual is None else residual,
        f"{name.upper()}RESIDUAL": residual is not None,
    }


def largest(cache: Cache) -> float:
    """The largest code, 0 where there are none."""
    return cache.encoding.largest if isinstance(cache, QuantizedCache) else 0


def token_bytes(cache: Cache) -> float:
    """Bytes of one token of one head, its share of the scales included."""
    data = data_of(cache)
    return data.shape[2:].numel() * data.element_size() / cache.shape[2]


def as_words(cache: Cache) -> Tensor:
    """The blocks [num_blocks, num_kv_heads, rows, words] as whoever copies them sees them: bytes by the word."""
    if not isinstance(cache, QuantizedCache):
        return cache
    data = cache.data
    measures = (data.shape[2], data.stride(0), data.stride(1), data.storage_offset())
    fitting = (word for word in WORDS if all(measure % word.itemsize == 0 for measure in measures))
    return data.view(next(fitting, torch.uint8))[:, :, None]


def check_cache(cache: Cache) -> None:
    """Raises ValueError for what no kernel can read."""
    if cache.dtype not in DTYPES:
        raise ValueError(f"no Triton kernel for a cache of {cache.dtype}; use one of {DTYPES}")
    block_size = cache.shape[2]
    if block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} is not a power of two; the kernels need one. Use 16 or 32.")
    if data_of(cache).stride(-1) != 1:
        raise ValueError(f"the head dim of a cache must be contiguous, its stride is {data_of(cache).stride(-1)}")
    if isinstance(cache, QuantizedCache):
        _check_encoding(cache, cache.encoding)


def _check_encoding(cache: QuantizedCache, encoding: Encoding) -> None:
    if not encoding.fits(cache.dim):
        raise ValueError(
            f"head dim {cache.dim} in {encoding.bits} bits is no whole number of bytes; use an encoding of 8 bits"
        )
    if encoding.scales == "head" and cache.scales is None:
        raise ValueError(f"{encoding.name} needs a scale for each of the {cache.shape[1]} heads; give `scales`")
    if any(measure % 2 for measure in (*cache.data.stride()[:2], cache.data.storage_offset())):
        raise ValueError(f"scales of two bytes must lie at even addresses, the strides are {cache.data.stride()}")
    residual = cache.residual
    if residual is not None and not (residual.is_contiguous() and residual.dtype == cache.dtype):
        raise ValueError(
            f"a residual must be contiguous and {cache.dtype}, as what is written; this one is {residual.dtype} with "
            f"strides {residual.stride()}"
        )
