"""Tensors and quantized caches as the compiled functions take them: addresses, kinds and strides in bytes.

The order is that of the records in `cpu_records`.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from hfpaged_kernels.cpu_bits import BFLOAT16, FLOAT16, FLOAT32
from hfpaged_kernels.cpu_codes import E4M3, E5M2, INT4, INT4_CHANNEL, INT8
from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import Cache, QuantizedCache

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
_CODES = {torch.int8: INT8, torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.uint8: INT4}


def can_read(cache: Cache) -> bool:
    """Whether the compiled functions can address the rows of a cache, in a dtype that they know."""
    if not isinstance(cache, QuantizedCache):
        _, _, row_stride, step = cache.stride()
        return cache.dtype in KINDS and step == 1 and row_stride == cache.shape[3]
    residual = cache.residual
    return can_quantize(cache) and (residual is None or (residual.dtype in KINDS and _heads_are_dense(residual)))


def can_quantize(cache: QuantizedCache) -> bool:
    """Whether the compiled functions can address the bytes of a quantized cache."""
    return cache.data.stride(2) == 1 and cache.encoding.fits(cache.dim)


def _heads_are_dense(residual: Tensor) -> bool:
    return residual.stride(3) == 1 and residual.stride(2) == residual.shape[3]


def kind_of(encoding: Encoding) -> int:
    return INT4_CHANNEL if encoding.scales == "channel" else _CODES[encoding.dtype]


def cache_part(cache: Cache) -> tuple[int, ...]:
    """The record of a cache. Its tensors must outlive it, as those of all calls."""
    if not isinstance(cache, QuantizedCache):
        size = SIZES[cache.dtype]
        block, head, _, _ = cache.stride()
        _, _, block_size, dim = cache.shape
        return (
            cache.data_ptr(), KINDS[cache.dtype], block * size, dim, block_size, 0, 1, 0, head * size, 0, 0, 0, FLOAT32,
        )  # fmt: skip
    block, head, _ = cache.data.stride()
    encoding, dim, block_size = cache.encoding, cache.dim, cache.block_size
    scales = 0 if cache.scales is None or encoding.scales != "head" else cache.scales.data_ptr()
    return (
        cache.data.data_ptr(), kind_of(encoding), block, dim, block_size, encoding.scales_at(block_size, dim),
        encoding.groups(dim), scales, head, *_residual_part(cache.residual),
    )  # fmt: skip


def _residual_part(residual: Tensor | None) -> tuple[int, int, int, int]:
    if residual is None:
        return 0, 0, 0, FLOAT32
    size = SIZES[residual.dtype]
    return residual.data_ptr(), residual.stride(0) * size, residual.stride(1) * size, KINDS[residual.dtype]


def rows_part(rows: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Rows [tokens, heads, dim] (a view is copied only if its elements are not dense), and their address, kind and
    strides.
    """
    token_stride, head_stride, step = rows.stride()
    if step != 1:
        rows = rows.contiguous()
        token_stride, head_stride, _ = rows.stride()
    size = SIZES[rows.dtype]
    return rows, rows.data_ptr(), KINDS[rows.dtype], token_stride * size, head_stride * size


def dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def record(*numbers: int) -> tuple[array[int], int]:
    """The numbers in memory, which the caller holds as long as they are read, and their address."""
    held = array("q", numbers)
    return held, held.buffer_info()[0]
