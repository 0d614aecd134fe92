"""Paged attention kernels: one function per operation, in torch, numba (CPU) and Triton (GPU)."""

from hfpaged_kernels.api import backend, copy_blocks, decode, gather, prefill, write_kv

__all__ = ["backend", "copy_blocks", "decode", "gather", "prefill", "write_kv"]
