"""How the Triton kernels are cut and launched: tile sizes, splits, and the arguments that kernels share."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hfpaged_kernels.quantized import Cache
from hfpaged_kernels.triton_parts import pad, part_arguments, token_bytes

# A window that hides nothing: positions are int32.
NO_WINDOW = 2**31 - 1
MAX_SPLITS = 64
# Shorter splits cost more in the merge than they bring.
MIN_SPLIT_LENGTH = 128
# What a launch more costs, in bytes of keys and values that a second reader finds in the cache of the device: about
# ten microseconds at some terabytes per second. An estimate, not a measurement.
SHARING_BYTES = 64 * 2**20


class Tiling(NamedTuple):
    """How an attention kernel is cut: query rows (at most) and context positions, and its launch options."""

    rows: int
    tile: int
    warps: int
    stages: int


def decode_tiling(dtype: torch.dtype, dim: int) -> Tiling:
    """The tiling of the decode kernel for the larger of key and value dim."""
    if dtype == torch.float32:
        # float32 without TF32 has no tensor cores: the product lives in registers, so tiles stay small.
        return Tiling(rows=16, tile=32 if pad(dim) <= 128 else 16, warps=4, stages=1)
    if pad(dim) <= 128:
        return Tiling(rows=64, tile=64, warps=4, stages=2)
    return Tiling(rows=32, tile=32, warps=4, stages=2 if pad(dim) <= 256 else 1)


def prefill_tiling(dtype: torch.dtype, dim: int) -> Tiling:
    """The tiling of the prefill kernel for the larger of key and value dim."""
    if dtype == torch.float32:
        return Tiling(rows=32, tile=32 if pad(dim) <= 128 else 16, warps=4 if pad(dim) <= 128 else 8, stages=1)
    if pad(dim) <= 128:
        # More positions at a time make registers spill on compute capability 8.0.
        return Tiling(rows=64, tile=64 if pad(dim) <= 64 else 32, warps=4, stages=2)
    return Tiling(rows=64 if pad(dim) <= 256 else 32, tile=32, warps=8, stages=2 if pad(dim) <= 256 else 1)


def num_splits(programs: int, longest: int, processors: int, most: int = MAX_SPLITS) -> int:
    """Into how many parts decode cuts each context: two programs per processor, but no part too short.

    `programs` run without a split; `longest` is the longest context that the block tables have room for.
    """
    wanted = triton.cdiv(2 * processors, programs)
    return max(1, min(wanted, triton.cdiv(longest, MIN_SPLIT_LENGTH), most))


class Prefix(NamedTuple):
    """How the positions that all sequences share are attended over: none of them, where that does not pay."""

    length: int
    row_tiles: int
    splits: int
    tiling: Tiling


def shared_prefix(
    query: Tensor, key_cache: Cache, value_cache: Cache, shared_blocks: int, window: int | None, processors: int
) -> Prefix:
    """A window hides part of the prefix, from each sequence another one, and leaves little of it: none is shared."""
    _, num_kv_heads, block_size, key_dim = key_cache.shape
    value_dim, length = value_cache.shape[3], shared_blocks * block_size
    rows = len(query) * (query.shape[1] // num_kv_heads)
    tiling = prefill_tiling(query.dtype, max(key_dim, value_dim))
    tiling = tiling._replace(rows=min(tiling.rows, pad(rows)))
    row_tiles = triton.cdiv(rows, tiling.rows)
    position_bytes = num_kv_heads * (token_bytes(key_cache) + token_bytes(value_cache))
    if window is not None or not sharing_pays(len(query), row_tiles, length, position_bytes):
        return Prefix(0, 0, 0, tiling)
    # The merge holds the states of prefix and rest together.
    splits = num_splits(row_tiles * num_kv_heads, length, processors, MAX_SPLITS // 2)
    return Prefix(length, row_tiles, splits, tiling)


def sharing_pays(readers: int, readers_of_shared: int, shared: int, bytes_per_position: float) -> bool:
    """Whether `readers_of_shared` programs instead of `readers` over the first `shared` positions save a launch."""
    return (readers - readers_of_shared) * shared * bytes_per_position > SHARING_BYTES


@functools.cache
def num_processors(device: torch.device) -> int:
    """How many multiprocessors `device` has; 1 for the CPU, where Triton's interpreter runs."""
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel's devices call them subslices.
    name = "multi_processor_count" if hasattr(properties, "multi_processor_count") else "gpu_subslice_count"
    return int(getattr(properties, name))


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(device)


def int32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int32).contiguous()


def attention_arguments(
    query: Tensor, key_cache: Cache, value_cache: Cache, block_tables: Tensor, most_heads: int,
    scale: float, window: int | None, softcap: float | None,
) -> dict[str, Any]:  # fmt: skip
    """What decode and prefill kernel have in common besides tensors of the step: sizes, scalars, caches, constants."""
    group = query.shape[1] // key_cache.shape[1]
    return {
        "num_heads": query.shape[1],
        "window": NO_WINDOW if window is None else window,
        "scale": scale,
        "softcap": 0.0 if softcap is None else softcap,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "table_stride": block_tables.stride(0),
        **part_arguments(key_cache, "key_"),
        **part_arguments(value_cache, "value_"),
        "GROUP": group,
        "HEADS": min(triton.next_power_of_2(group), most_heads),
        "BLOCK_SIZE": key_cache.shape[2],
        "HAS_SOFTCAP": softcap is not None,
    }
