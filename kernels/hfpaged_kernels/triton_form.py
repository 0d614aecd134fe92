"""The Triton form of every operation: what `reference` says, checked, prepared and launched.

Nothing here waits for the device except `gather`, whose result has a size that only the device knows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hfpaged_kernels import triton_launch as launch
from hfpaged_kernels import triton_parts as parts
from hfpaged_kernels.quantized import Cache, QuantizedCache
from hfpaged_kernels.triton_blocks import copy_blocks_kernel, gather_kernel
from hfpaged_kernels.triton_decode import decode_kernel, merge_kernel
from hfpaged_kernels.triton_prefill import prefill_kernel
from hfpaged_kernels.triton_shared import shared_kernel
from hfpaged_kernels.triton_store import write_blocks_kernel, write_kv_kernel


def write_kv(key: Tensor, value: Tensor, key_cache: Cache, value_cache: Cache, slots: Tensor) -> None:
    """See `reference.write_kv`. Key and value may have any strides: they are not copied."""
    for cache in (key_cache, value_cache):
        parts.check_cache(cache)
        if isinstance(cache, QuantizedCache) and cache.encoding.scales == "channel":
            raise ValueError(f"{cache.encoding.name} has scales for whole blocks: write_blocks stores them, not tokens")
    num_tokens, num_kv_heads = key.shape[:2]
    if num_tokens == 0:
        return
    with launch.on_device(key_cache.device):
        write_kv_kernel[(num_tokens, num_kv_heads)](
            key, value, slots.contiguous(), *key.stride(), *value.stride(),
            **parts.part_arguments(key_cache, "key_"), **parts.part_arguments(value_cache, "value_"),
            BLOCK_SIZE=key_cache.shape[2],
            KEY_LARGEST=parts.largest(key_cache), VALUE_LARGEST=parts.largest(value_cache),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def write_blocks(rows: Tensor, cache: QuantizedCache, blocks: Tensor, sources: Tensor) -> None:
    """See `reference.write_blocks`. `rows` may have any strides: they are not copied."""
    parts.check_cache(cache)
    if len(blocks) == 0:
        return
    with launch.on_device(cache.device):
        write_blocks_kernel[(len(blocks), cache.shape[1])](
            rows, blocks.contiguous(), sources.contiguous(), *rows.stride(), **parts.part_arguments(cache),
            BLOCK_SIZE=cache.block_size, LARGEST=parts.largest(cache),
            TILE=min(cache.block_size, _rows_at_a_time(cache.dim)), enable_fp_fusion=False,
        )  # fmt: skip


def copy_blocks(key_cache: Cache, value_cache: Cache, sources: Tensor, targets: Tensor) -> None:
    """See `reference.copy_blocks`."""
    for cache in (key_cache, value_cache):
        parts.check_cache(cache)
        data = parts.as_words(cache)
        if len(sources) == 1:
            _copy(data, data, sources, targets)
        elif len(sources) > 1:
            # By way of a stage, as a block may be the target of one copy and the source of another.
            stage = data.new_empty(len(sources), *data.shape[1:])
            places = torch.arange(len(sources), device=data.device)
            _copy(data, stage, sources, places)
            _copy(stage, data, places, targets)


def gather(cache: Cache, block_tables: Tensor, lengths: Tensor, residuals: Tensor | None = None) -> Tensor:
    """See `reference.gather`."""
    parts.check_cache(cache)
    longest = int(lengths.max()) if lengths.numel() else 0
    num_seqs, num_kv_heads, dim = len(lengths), cache.shape[1], cache.shape[3]
    dense = torch.empty(num_seqs, num_kv_heads, longest, dim, dtype=cache.dtype, device=cache.device)
    if dense.numel() == 0:
        return dense
    tables, lengths, tile = launch.int32(block_tables), launch.int32(lengths), _rows_at_a_time(dim)
    with launch.on_device(cache.device):
        gather_kernel[(num_seqs, num_kv_heads, triton.cdiv(longest, tile))](
            tables, lengths, lengths if residuals is None else launch.int32(residuals), dense,
            longest, tables.stride(0), **parts.part_arguments(cache), **parts.residual_arguments(cache, residuals),
            BLOCK_SIZE=cache.shape[2], TILE=tile,
        )  # fmt: skip
    return dense


def decode(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared_blocks: int = 0,
    residuals: Tensor | None = None,
) -> Tensor:
    """See `reference.decode`."""
    query = _checked_query(query, key_cache, value_cache, window)
    num_seqs, num_heads = query.shape[:2]
    out = query.new_empty(num_seqs, num_heads, value_cache.shape[3])
    if out.numel() == 0:
        return out
    tables, lengths = launch.int32(block_tables), launch.int32(context_lengths)
    tiling = launch.decode_tiling(query.dtype, max(key_cache.shape[3], value_cache.shape[3]))
    arguments = launch.attention_arguments(query, key_cache, value_cache, tables, tiling.rows, scale, window, softcap)
    sink_arguments = {
        "sinks_ptr": query if sinks is None else sinks.contiguous(),
        "HAS_SINKS": sinks is not None,
    }
    processors = launch.num_processors(query.device)
    prefix = launch.shared_prefix(query, key_cache, value_cache, shared_blocks, window, processors)
    programs_per_seq = key_cache.shape[1] * triton.cdiv(arguments["GROUP"], arguments["HEADS"])
    longest = min(tables.shape[1] * key_cache.shape[2] - prefix.length, arguments["window"])
    most = launch.MAX_SPLITS - prefix.splits
    states = prefix.splits + launch.num_splits(num_seqs * programs_per_seq, longest, processors, most)
    partial, maxima, totals = _partial_states(out, states)
    with launch.on_device(query.device):
        if prefix.length:
            _attend_prefix(prefix, query, tables, lengths, arguments, partial, maxima, totals)
        decode_kernel[(num_seqs, programs_per_seq, states - prefix.splits)](
            query, tables, lengths, **_residual_arguments(key_cache, value_cache, residuals, lengths),
            out_ptr=partial, maxima_ptr=maxima, totals_ptr=totals, **sink_arguments, **arguments,
            num_states=states, shared_states=prefix.splits, shared=prefix.length,
            ROWS=max(arguments["HEADS"], 16), TILE=tiling.tile, IS_SPLIT=states > 1,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        if states > 1:
            merge_kernel[(num_seqs, num_heads)](
                partial, maxima, totals, out_ptr=out, num_heads=num_heads, num_splits=states,
                **sink_arguments, SPLITS_PAD=triton.next_power_of_2(states),
                **parts.dims("VALUE", out.shape[2]),
            )  # fmt: skip
    return out


def _attend_prefix(
    prefix: launch.Prefix, query: Tensor, tables: Tensor, lengths: Tensor, arguments: dict[str, Any], *states: Tensor
) -> None:  # fmt: skip
    """Write the states of the shared positions, read once for all sequences, in front of those of decode."""
    shared_kernel[(prefix.row_tiles, query.shape[1] // arguments["GROUP"], prefix.splits)](
        query, tables, lengths, *states,
        num_seqs=len(query), num_states=states[1].shape[-1], shared=prefix.length,
        **{name: value for name, value in arguments.items() if name != "HEADS"},
        ROWS=prefix.tiling.rows, TILE=prefix.tiling.tile,
        num_warps=prefix.tiling.warps, num_stages=prefix.tiling.stages,
    )  # fmt: skip


def prefill(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    residuals: Tensor | None = None,
) -> Tensor:
    """See `reference.prefill`."""
    query = _checked_query(query, key_cache, value_cache, window)
    num_seqs = len(query_lengths)
    # Zeros, as the kernel does not visit the rows that no sequence owns.
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    if out.numel() == 0 or num_seqs == 0:
        return out
    tables, lengths = launch.int32(block_tables), launch.int32(context_lengths)
    tiling = launch.prefill_tiling(query.dtype, max(key_cache.shape[3], value_cache.shape[3]))
    arguments = launch.attention_arguments(query, key_cache, value_cache, tables, tiling.rows, scale, window, softcap)
    tokens = tiling.rows // arguments["HEADS"]
    tile_ends = ((query_lengths + tokens - 1) // tokens).cumsum(0, dtype=torch.int32)
    # However the tokens fall into sequences, there are no more tiles than this.
    tiles = len(query) // tokens + num_seqs
    with launch.on_device(query.device):
        prefill_kernel[(tiles, key_cache.shape[1] * triton.cdiv(arguments["GROUP"], arguments["HEADS"]))](
            query, tables, lengths,
            sinks_ptr=query if sinks is None else sinks.contiguous(),
            query_starts_ptr=launch.int32(query_starts), query_lengths_ptr=launch.int32(query_lengths),
            tile_ends_ptr=tile_ends, out_ptr=out, num_seqs=num_seqs,
            **_residual_arguments(key_cache, value_cache, residuals, lengths), **arguments,
            ROWS=tiling.rows, TILE=tiling.tile, HAS_SINKS=sinks is not None,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return out


def _residual_arguments(
    key_cache: Cache, value_cache: Cache, residuals: Tensor | None, lengths: Tensor
) -> dict[str, Any]:  # fmt: skip
    """`lengths` stand for residuals where there are none."""
    return {
        "residuals_ptr": lengths if residuals is None else launch.int32(residuals),
        **parts.residual_arguments(key_cache, residuals, "key_"),
        **parts.residual_arguments(value_cache, residuals, "value_"),
    }


def _partial_states(out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for accumulator, maximum and total of each split; one split finishes its rows in `out` instead."""
    if splits == 1:
        return out, out, out
    num_seqs, num_heads, value_dim = out.shape
    accumulators = out.new_empty(num_seqs, num_heads, splits, value_dim, dtype=torch.float32)
    maxima, totals = out.new_empty(2, num_seqs, num_heads, splits, dtype=torch.float32)
    return accumulators, maxima, totals


def _copy(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    _, num_kv_heads, block_size, dim = source.shape
    with launch.on_device(source.device):
        copy_blocks_kernel[(len(source_ids), num_kv_heads)](
            source, target, source_ids.contiguous(), target_ids.contiguous(),
            *source.stride()[:3], *target.stride()[:3],
            BLOCK_SIZE=block_size, DIM=dim, DIM_PAD=parts.pad(dim),
            TILE=min(block_size, _rows_at_a_time(dim)),
        )  # fmt: skip


def _rows_at_a_time(dim: int) -> int:
    """Rows that a copying program holds in registers at once: 8,192 elements, 64 for each of 128 threads."""
    return max(1, 8192 // parts.pad(dim))


def _checked_query(query: Tensor, key_cache: Cache, value_cache: Cache, window: int | None) -> Tensor:
    """`query` with its head dim contiguous, once everything about the call is found to be in order."""
    parts.check_cache(key_cache)
    parts.check_cache(value_cache)
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"query is {query.dtype}, the caches are {key_cache.dtype} and {value_cache.dtype}; the Triton "
            "kernels need one dtype. Make the cache with the dtype of the model."
        )
    if query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"query has head dim {query.shape[2]}, the key cache {key_cache.shape[3]}")
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {key_cache.shape[1]} KV heads")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a token sees at least itself. Use None for no window.")
    return query if query.stride(2) == 1 else query.contiguous()
