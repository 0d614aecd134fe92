"""The kernels for CPUs: tensors become addresses and strides, compiled functions do the rest.

Shapes and meanings are those of `reference`. Tensors that the compiled functions cannot address (float64
caches, say) go to
`reference` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfpaged_kernels import cpu_blocks, cpu_decode, cpu_dense, cpu_prefill, cpu_shared, cpu_threads, reference
from hfpaged_kernels.cpu_bits import BFLOAT16, FLOAT16, FLOAT32

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    if not (_can_write(key, key_cache) and _can_write(value, value_cache)):
        return reference.write_kv(key, value, key_cache, value_cache, slots)
    slots = _dense(slots, torch.int64)
    _write(key, key_cache, slots)
    _write(value, value_cache, slots)
    return None


def _write(source: Tensor, cache: Tensor, slots: Tensor) -> None:
    tokens, heads, dim = source.shape
    token_stride, head_stride, step = source.stride()
    if step != 1:
        source = source.contiguous()
        token_stride, head_stride, step = source.stride()
    size, cache_size = _SIZES[source.dtype], _SIZES[cache.dtype]
    block_stride, cache_head_stride, row_stride, _ = cache.stride()
    cpu_blocks.write_rows(
        source.data_ptr(), _KINDS[source.dtype], token_stride * size, head_stride * size,
        cache.data_ptr(), _KINDS[cache.dtype], block_stride * cache_size, cache_head_stride * cache_size,
        row_stride * cache_size, slots.data_ptr(), tokens, heads, dim, cache.shape[2],
    )  # fmt: skip


def copy_blocks(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    sources, targets = _dense(sources, torch.int64), _dense(targets, torch.int64)
    dense = _blocks_are_dense(key_cache) and _blocks_are_dense(value_cache)
    if not dense or cpu_blocks.overlap(sources.data_ptr(), targets.data_ptr(), len(targets)):
        return reference.copy_blocks(key_cache, value_cache, sources, targets)
    for cache in (key_cache, value_cache):
        size = cache.element_size()
        cpu_blocks.copy_whole_blocks(
            cache.data_ptr(), cache.stride(0) * size, cache[0].numel() * size,
            sources.data_ptr(), targets.data_ptr(), len(targets),
        )  # fmt: skip
    return None


def gather(cache: Tensor, block_tables: Tensor, lengths: Tensor, residuals: Tensor | None = None) -> Tensor:
    if not _rows_are_dense(cache):
        return reference.gather(cache, block_tables, lengths)
    lengths, tables = _dense(lengths, torch.int32), _dense(block_tables, torch.int32)
    _, heads, block_size, dim = cache.shape
    size = _SIZES[cache.dtype]
    longest = int(lengths.max()) if len(lengths) else 0
    dense = cache.new_empty((len(lengths), heads, longest, dim))
    cpu_blocks.gather_rows(
        cache.data_ptr(), cache.stride(0) * size, cache.stride(1) * size, dim * size, block_size, heads,
        tables.data_ptr(), tables.stride(0) * 4, lengths.data_ptr(), len(lengths), dense.data_ptr(), longest,
    )  # fmt: skip
    return dense


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
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
            scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    seqs, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    lengths, tables = _dense(context_lengths, torch.int32), _dense(block_tables, torch.int32)
    logits = None if sinks is None else _dense(sinks, torch.float32)
    query, *query_part = _query_part(query)
    out = query.new_empty((seqs, heads, value_dim))
    call = (
        *query_part, *_caches_part(key_cache, value_cache), tables.data_ptr(), tables.stride(0) * 4,
        lengths.data_ptr(), 0 if logits is None else logits.data_ptr(),
        out.data_ptr(), seqs, kv_heads, heads // kv_heads, key_dim, value_dim, block_size, window or 0,
    )  # fmt: skip
    shared = shared_blocks * block_size if window is None else 0
    prefix = _prefix(shared, lengths, call, scale, softcap or 0.0)
    part = (0, 0) if prefix is None else (shared, prefix.data_ptr())
    cpu_threads.run(cpu_decode.decode, *part, call, scale, softcap or 0.0)
    return out


def _prefix(shared: int, lengths: Tensor, call: tuple[int, ...], scale: float, softcap: float) -> Tensor | None:
    """Partial results of the first `shared` positions, read once for all sequences; None where that does not pay."""
    seqs, kv_heads, group, _, value_dim = call[16:21]
    if not cpu_shared.sharing_pays(seqs, kv_heads, group, shared, torch.get_num_threads()):
        return None
    # A sequence that ends within the shared part would read what is not its own.
    if not cpu_shared.all_go_beyond(lengths.data_ptr(), seqs, shared):
        return None
    prefix = torch.empty(cpu_shared.prefix_floats(seqs, kv_heads, group, value_dim), dtype=torch.float32)
    cpu_threads.run(cpu_shared.attend_prefix, shared, prefix.data_ptr(), call, scale, softcap)
    return prefix


def prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
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
            scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    plain = window is None and softcap is None and sinks is None
    if cpu_dense.dense_is_faster(query, key_cache, len(query_lengths), plain):
        return cpu_dense.prefill(
            query, key_cache, value_cache, block_tables, context_lengths, query_starts, query_lengths,
            scale=scale, gather=gather,
        )  # fmt: skip
    tokens, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    contexts, starts = _dense(context_lengths, torch.int32), _dense(query_starts, torch.int32)
    lengths, tables = _dense(query_lengths, torch.int32), _dense(block_tables, torch.int32)
    logits = None if sinks is None else _dense(sinks, torch.float32)
    query, *query_part = _query_part(query)
    out = query.new_empty((tokens, heads, value_dim))
    call = (
        *query_part, *_caches_part(key_cache, value_cache), tables.data_ptr(), tables.stride(0) * 4,
        contexts.data_ptr(), starts.data_ptr(), lengths.data_ptr(), 0 if logits is None else logits.data_ptr(),
        out.data_ptr(), len(lengths), tokens, kv_heads, heads // kv_heads, key_dim, value_dim, block_size,
        window or 0,
    )  # fmt: skip
    cpu_threads.run(cpu_prefill.prefill, call, scale, softcap or 0.0)
    return out


def _can_write(source: Tensor, cache: Tensor) -> bool:
    return source.dtype in _KINDS and _rows_are_dense(cache)


def _can_attend(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    same = key_cache.dtype is value_cache.dtype
    return same and query.dtype in _KINDS and _rows_are_dense(key_cache) and _rows_are_dense(value_cache)


def _query_part(query: Tensor) -> tuple[Tensor, int, int, int, int]:
    """The query (a view is copied only if its rows are not dense), its address, dtype and strides in bytes."""
    if query.stride(2) != 1:
        query = query.contiguous()
    size = _SIZES[query.dtype]
    return query, query.data_ptr(), _KINDS[query.dtype], query.stride(0) * size, query.stride(1) * size


def _caches_part(key_cache: Tensor, value_cache: Tensor) -> tuple[int, int, int, int, int, int, int]:
    """Addresses, dtype, and strides in bytes of blocks and heads."""
    size = _SIZES[key_cache.dtype]
    key_block, key_head, _, _ = key_cache.stride()
    value_block, value_head, _, _ = value_cache.stride()
    return (
        key_cache.data_ptr(), value_cache.data_ptr(), _KINDS[key_cache.dtype],
        key_block * size, key_head * size, value_block * size, value_head * size,
    )  # fmt: skip


def _rows_are_dense(cache: Tensor) -> bool:
    """Whether the rows of each block and head lie one after the other, in a dtype that the kernels know."""
    strides = cache.stride()
    return strides[3] == 1 and strides[2] == cache.shape[3] and cache.dtype in _KINDS


def _blocks_are_dense(cache: Tensor) -> bool:
    """Whether each block is one piece of memory."""
    return len(cache) > 0 and cache[0].is_contiguous()


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
