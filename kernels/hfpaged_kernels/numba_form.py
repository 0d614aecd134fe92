"""The kernels for CPUs: tensors become addresses and strides, compiled functions do the rest.

Shapes and meanings are those of `reference`. Tensors that the compiled functions cannot address (float64
caches, say) go to `reference` instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfpaged_kernels import (
    cpu_blocks,
    cpu_decode,
    cpu_dense,
    cpu_prefill,
    cpu_quantizing,
    cpu_shared,
    cpu_threads,
    reference,
)
from hfpaged_kernels.cpu_calls import (
    KINDS,
    SIZES,
    address_of,
    cache_part,
    can_quantize,
    can_read,
    dense,
    record,
    rows_part,
)
from hfpaged_kernels.quantized import Cache, QuantizedCache, data_of


def write_kv(key: Tensor, value: Tensor, key_cache: Cache, value_cache: Cache, slots: Tensor) -> None:
    if not (_can_write(key, key_cache) and _can_write(value, value_cache)):
        return reference.write_kv(key, value, key_cache, value_cache, slots)
    slots = dense(slots, torch.int64)
    _write(key, key_cache, slots)
    _write(value, value_cache, slots)
    return None


def _can_write(source: Tensor, cache: Cache) -> bool:
    if isinstance(cache, QuantizedCache):
        return source.dtype in KINDS and can_quantize(cache) and cache.encoding.scales != "channel"
    return source.dtype in KINDS and cache.dtype in KINDS and cache.stride(3) == 1


def _write(source: Tensor, cache: Cache, slots: Tensor) -> None:
    tokens, heads, dim = source.shape
    source, *source_part = rows_part(source)
    if isinstance(cache, QuantizedCache):
        _held, own = record(*cache_part(cache))
        cpu_quantizing.write_tokens(*source_part, own, slots.data_ptr(), tokens, heads)
        return
    size = SIZES[cache.dtype]
    block_stride, head_stride, row_stride, _ = cache.stride()
    cpu_blocks.write_rows(
        *source_part, cache.data_ptr(), KINDS[cache.dtype], block_stride * size, head_stride * size,
        row_stride * size, slots.data_ptr(), tokens, heads, dim, cache.shape[2],
    )  # fmt: skip


def write_blocks(rows: Tensor, cache: QuantizedCache, blocks: Tensor, sources: Tensor) -> None:
    if not (rows.dtype in KINDS and can_quantize(cache)):
        return reference.write_blocks(rows, cache, blocks, sources)
    blocks, sources = dense(blocks, torch.int64), dense(sources, torch.int64)
    rows, *rows_call = rows_part(rows)
    _held, own = record(*cache_part(cache))
    cpu_quantizing.write_blocks(*rows_call, own, blocks.data_ptr(), sources.data_ptr(), len(blocks), rows.shape[1])
    return None


def copy_blocks(key_cache: Cache, value_cache: Cache, sources: Tensor, targets: Tensor) -> None:
    sources, targets = dense(sources, torch.int64), dense(targets, torch.int64)
    datas = data_of(key_cache), data_of(value_cache)
    if not all(map(_blocks_are_dense, datas)) or cpu_blocks.overlap(
        sources.data_ptr(), targets.data_ptr(), len(targets)
    ):
        return reference.copy_blocks(key_cache, value_cache, sources, targets)
    for data in datas:
        size = data.element_size()
        cpu_blocks.copy_whole_blocks(
            data.data_ptr(), data.stride(0) * size, data[0].numel() * size,
            sources.data_ptr(), targets.data_ptr(), len(targets),
        )  # fmt: skip
    return None


def _blocks_are_dense(data: Tensor) -> bool:
    """Whether each block is one piece of memory."""
    return len(data) > 0 and data[0].is_contiguous()


def gather(cache: Cache, block_tables: Tensor, lengths: Tensor, residuals: Tensor | None = None) -> Tensor:
    if not can_read(cache) or cache.dtype not in KINDS:
        return reference.gather(cache, block_tables, lengths, residuals)
    lengths, tables = dense(lengths, torch.int32), dense(block_tables, torch.int32)
    residuals = None if residuals is None else dense(residuals, torch.int32)
    _, heads, block_size, dim = cache.shape
    longest = int(lengths.max()) if len(lengths) else 0
    result = torch.empty((len(lengths), heads, longest, dim), dtype=cache.dtype)
    if isinstance(cache, QuantizedCache):
        _held, own = record(*cache_part(cache))
        cpu_blocks.gather_quantized(
            own, heads, tables.data_ptr(), tables.stride(0) * 4, lengths.data_ptr(),
            address_of(residuals), len(lengths), result.data_ptr(), KINDS[cache.dtype], longest,
        )  # fmt: skip
        return result
    size = SIZES[cache.dtype]
    cpu_blocks.gather_rows(
        cache.data_ptr(), cache.stride(0) * size, cache.stride(1) * size, dim * size, block_size, heads,
        tables.data_ptr(), tables.stride(0) * 4, lengths.data_ptr(), len(lengths), result.data_ptr(), longest,
    )  # fmt: skip
    return result


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
    if not _can_attend(query, key_cache, value_cache):
        return reference.decode(
            query, key_cache, value_cache, block_tables, context_lengths,
            scale=scale, window=window, softcap=softcap, sinks=sinks, residuals=residuals,
        )  # fmt: skip
    tensors = _small_tensors(block_tables, context_lengths, residuals, sinks)
    query, *query_part = rows_part(query)
    seqs, heads, _ = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    out = query.new_empty((seqs, heads, value_dim))
    _held, call = record(
        *query_part, *cache_part(key_cache), *cache_part(value_cache), *_rest(tensors, out, seqs, kv_heads, window)
    )
    shared, prefix = shared_blocks * block_size if window is None else 0, None
    if cpu_shared.sharing_pays(seqs, kv_heads, heads // kv_heads, shared, torch.get_num_threads()):
        prefix = _prefix(shared, tensors[1], out.shape, kv_heads, call, scale, softcap or 0.0)
    part = (0, 0) if prefix is None else (shared, prefix.data_ptr())
    cpu_threads.run(cpu_decode.decode, *part, call, scale, softcap or 0.0)
    return out


def _prefix(
    shared: int, lengths: Tensor, shape: torch.Size, kv_heads: int, call: int, scale: float, softcap: float
) -> Tensor | None:
    """Partial results of the first `shared` positions, read once for all sequences."""
    seqs, heads, value_dim = shape
    # A sequence that ends within the shared part would read what is not its own.
    if not cpu_shared.all_go_beyond(lengths.data_ptr(), seqs, shared):
        return None
    prefix = torch.empty(cpu_shared.prefix_floats(seqs, kv_heads, heads // kv_heads, value_dim), dtype=torch.float32)
    cpu_threads.run(cpu_shared.attend_prefix, shared, prefix.data_ptr(), call, scale, softcap)
    return prefix


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
    if not _can_attend(query, key_cache, value_cache):
        return reference.prefill(
            query, key_cache, value_cache, block_tables, context_lengths, query_starts, query_lengths,
            scale=scale, window=window, softcap=softcap, sinks=sinks, residuals=residuals,
        )  # fmt: skip
    plain = window is None and softcap is None and sinks is None
    if cpu_dense.dense_is_faster(query, key_cache, value_cache, len(query_lengths), plain):
        return cpu_dense.prefill(
            query, key_cache, value_cache, block_tables, context_lengths, query_starts, query_lengths,
            scale=scale, gather=gather,
        )  # fmt: skip
    tensors = _small_tensors(block_tables, context_lengths, residuals, sinks)
    starts, lengths = dense(query_starts, torch.int32), dense(query_lengths, torch.int32)
    query, *query_part = rows_part(query)
    out = query.new_empty((*query.shape[:2], value_cache.shape[3]))
    _held, call = record(
        *query_part, *cache_part(key_cache), *cache_part(value_cache),
        *_rest(tensors, out, len(lengths), key_cache.shape[1], window),
        starts.data_ptr(), lengths.data_ptr(), len(query),
    )  # fmt: skip
    cpu_threads.run(cpu_prefill.prefill, call, scale, softcap or 0.0)
    return out


def _can_attend(query: Tensor, key_cache: Cache, value_cache: Cache) -> bool:
    return query.dtype in KINDS and can_read(key_cache) and can_read(value_cache)


def _small_tensors(tables: Tensor, lengths: Tensor, residuals: Tensor | None, sinks: Tensor | None) -> tuple[Any, ...]:
    """The smaller tensors of a call as the compiled functions want them; the caller holds them as long as it runs."""
    return (
        dense(tables, torch.int32), dense(lengths, torch.int32),
        None if residuals is None else dense(residuals, torch.int32),
        None if sinks is None else dense(sinks, torch.float32),
    )  # fmt: skip


def _rest(tensors: tuple[Any, ...], out: Tensor, num_seqs: int, kv_heads: int, window: int | None) -> tuple[int, ...]:
    """What follows the caches in a call."""
    tables, lengths, residuals, sinks = tensors
    return (
        tables.data_ptr(), tables.stride(0) * 4, lengths.data_ptr(), address_of(residuals), address_of(sinks),
        out.data_ptr(), num_seqs, kv_heads, out.shape[1] // kv_heads, window or 0,
    )  # fmt: skip
