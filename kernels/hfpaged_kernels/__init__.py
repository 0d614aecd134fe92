"""Paged attention kernels: one function per operation, in torch, numba (CPU) and Triton (GPU)."""

from hfpaged_kernels.api import backend, copy_blocks, decode, gather, prefill, write_blocks, write_kv
from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import Cache, QuantizedCache

__all__ = [
    "Cache",
    "Encoding",
    "QuantizedCache",
    "backend",
    "copy_blocks",
    "decode",
    "gather",
    "prefill",
    "write_blocks",
    "write_kv",
]
