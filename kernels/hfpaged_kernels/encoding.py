"""How quantized keys or values lie in memory: as records, and where each part of a block's bytes begins.

One head of one block is one run of bytes, codes first, scales behind them, so that whatever moves a block (a copy, a
file) moves its scales too:

    codes    [block_size, dim] of `bits` each; of four bits, element 2 i is the low half of byte i, 2 i + 1 the high
    scales   "token"    bfloat16 [block_size]; where there is a lowest value too [block_size, groups, 2]: scale and low
             "channel"  uint8 [2, dim] codes of scales and of lows, bfloat16 [4] (step of the scales, lowest low, step
                        of the lows, 0)
             "head"     none here: one float32 for each head of the layer, given beside the cache

A scale that is stored as bfloat16 is rounded up, a low down, so that nothing is clipped; codes are made with what is
stored. bfloat16, as its range is that of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Along = Literal["token", "channel", "head"]


@dataclass(frozen=True)
class Encoding:
    """A number x is stored as round((x - low) / scale), at most `largest` (in size, where there is no low).

    `dtype` is that of the codes, uint8 where two of them share a byte. `scales` says what has a scale of its own: a
    token of a head, of which a `group` of so many elements has one where its size is given and divides the dim; a
    channel of a block; a head, in all blocks.
    """

    name: str
    dtype: torch.dtype
    bits: int
    largest: float
    scales: Along = "token"
    has_low: bool = False
    group: int | None = None

    def groups(self, dim: int) -> int:
        """Into how many parts with a scale of their own one row is cut."""
        return dim // self.group if self.group and dim % self.group == 0 else 1

    def row_bytes(self, dim: int) -> int:
        """Bytes of the codes of one token of one head."""
        return dim * self.bits // 8

    def scales_at(self, block_size: int, dim: int) -> int:
        """Where the scales of one head of one block begin: behind its codes, at an even address."""
        return _even(block_size * self.row_bytes(dim))

    def head_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of one head of one block, scales included."""
        scales = {
            "token": 2 * block_size * (2 * self.groups(dim) if self.has_low else 1),
            "channel": 2 * dim + 8,
            "head": 0,
        }
        return self.scales_at(block_size, dim) + scales[self.scales]

    def fits(self, dim: int) -> bool:
        """Whether rows of `dim` elements are whole bytes."""
        return dim * self.bits % 8 == 0


def _even(count: int) -> int:
    return count + count % 2


INT8 = Encoding("int8", torch.int8, 8, 127)
FP8_E4M3 = Encoding("fp8_e4m3", torch.float8_e4m3fn, 8, 448)
FP8_E5M2 = Encoding("fp8_e5m2", torch.float8_e5m2, 8, 57344)
FP8_E4M3_STATIC = Encoding("fp8_e4m3_static", torch.float8_e4m3fn, 8, 448, scales="head")
FP8_E5M2_STATIC = Encoding("fp8_e5m2_static", torch.float8_e5m2, 8, 57344, scales="head")
INT4 = Encoding("int4", torch.uint8, 4, 15, has_low=True)
INT4_GROUPS = Encoding("int4_groups", torch.uint8, 4, 15, has_low=True, group=32)
INT4_CHANNEL = Encoding("int4_channel", torch.uint8, 4, 15, scales="channel", has_low=True)

ENCODINGS = (
    INT8, FP8_E4M3, FP8_E5M2, FP8_E4M3_STATIC, FP8_E5M2_STATIC, INT4, INT4_GROUPS, INT4_CHANNEL,
)  # fmt: skip
