"""A quantized cache of keys or values: its bytes, and what is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hfpaged_kernels.encoding import Encoding


@dataclass(frozen=True)
class QuantizedCache:
    """Keys or values of one layer, quantized; all forms take it in the place of a plain cache.

    data      uint8 [num_blocks, num_kv_heads, encoding.head_bytes(block_size, dim)]
    scales    float32 [num_kv_heads], for encodings with one scale per head
    residual  [num_residuals, block_size, num_kv_heads, dim] of the computed dtype, or None: blocks that are not full
              yet. With residuals a block is quantized when it is full (`write_blocks`) and not token by token; the last
              block of a sequence, while it is not full, lies in the residual that `residuals[seq]` names.
    dtype     what `gather` gives: that of the numbers before they were quantized
    """

    data: Tensor
    encoding: Encoding
    block_size: int
    dim: int
    dtype: torch.dtype
    scales: Tensor | None = None
    residual: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(num_blocks, num_kv_heads, block_size, dim), as that of a plain cache."""
        return (self.data.shape[0], self.data.shape[1], self.block_size, self.dim)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def codes(self) -> Tensor:
        """A view [num_blocks, num_kv_heads, block_size, row bytes] uint8."""
        row = self.encoding.row_bytes(self.dim)
        return self.data[..., : self.block_size * row].unflatten(-1, (self.block_size, row))

    @property
    def token_scales(self) -> Tensor:
        """A view bfloat16 [num_blocks, num_kv_heads, block_size], or [.., groups, 2] with a low."""
        region = self._scales_region().view(torch.bfloat16)
        if not self.encoding.has_low:
            return region
        return region.unflatten(-1, (self.block_size, self.encoding.groups(self.dim), 2))

    @property
    def channel_codes(self) -> Tensor:
        """A view uint8 [num_blocks, num_kv_heads, 2, dim]: the codes of scales and lows."""
        return self._scales_region()[..., : 2 * self.dim].unflatten(-1, (2, self.dim))

    @property
    def channel_steps(self) -> Tensor:
        """A view bfloat16 [num_blocks, num_kv_heads, 4]: step of the scales, lowest low, step of the lows, 0."""
        return self._scales_region()[..., 2 * self.dim :].view(torch.bfloat16)

    def _scales_region(self) -> Tensor:
        return self.data[..., self.encoding.scales_at(self.block_size, self.dim) :]


Cache = Tensor | QuantizedCache


def data_of(cache: Cache) -> Tensor:
    """The tensor that holds whole blocks."""
    return cache.data if isinstance(cache, QuantizedCache) else cache
