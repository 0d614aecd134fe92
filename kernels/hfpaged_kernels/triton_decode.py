# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Paged attention of one query token per sequence, split over the context, and the merge of the splits."""

import triton
import triton.language as tl

from hfpaged_kernels.triton_attend import attend_positions
from hfpaged_kernels.triton_load import find_residual
from hfpaged_kernels.triton_math import final_weight, merge_states
from hfpaged_kernels.triton_rows import load_rows, load_sinks, store_rows


@triton.jit
def decode_kernel(
    query_ptr, block_tables_ptr, context_lengths_ptr, residuals_ptr, sinks_ptr,
    out_ptr, maxima_ptr, totals_ptr,
    num_heads, num_states, shared_states, shared, window, scale, softcap,
    query_token_stride, query_head_stride, table_stride,
    key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
    value_cache_ptr, value_scales_ptr, value_residual_ptr, value_block_stride, value_head_stride, value_slot_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    KEY_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, KEY_GROUPS: tl.constexpr, KEY_RESIDUAL: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, VALUE_GROUPS: tl.constexpr, VALUE_RESIDUAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    # One program attends for HEADS query heads of one KV head of one sequence over one split of the context.
    # out_ptr is [num_seqs, num_heads, num_states, VALUE_DIM]: the partial sums, or with one state the result. The first
    # shared_states are not written here: they are those of the first `shared` positions, left to shared_kernel.
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    chunks_per_group: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // chunks_per_group
    in_group = (tl.program_id(1) % chunks_per_group) * HEADS + tl.arange(0, ROWS)
    # tl.dot wants at least 16 rows: those behind HEADS or the group are padding, never loaded or stored.
    real = (tl.arange(0, ROWS) < HEADS) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group

    context = tl.load(context_lengths_ptr + seq)
    visible_from = tl.maximum(context - window, shared)
    aligned_from = visible_from // TILE * TILE
    # Whole tiles per split, so that no tile is read by two programs.
    split_length = tl.cdiv(tl.cdiv(context - aligned_from, num_splits), TILE) * TILE
    first = aligned_from + split * split_length
    last = tl.minimum(first + split_length, context)

    residual, residual_from = find_residual(residuals_ptr + seq, context, BLOCK_SIZE, KEY_RESIDUAL or VALUE_RESIDUAL)
    query = load_rows(query_ptr, seq * query_token_stride + heads * query_head_stride, real, KEY_DIM, KEY_PAD)
    accumulator, maximum, total = attend_positions(
        query, heads, block_tables_ptr + seq * table_stride, kv_head, num_heads // GROUP, residual, residual_from,
        first, visible_from, last, window, scale, softcap,
        key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
        value_cache_ptr, value_scales_ptr, value_residual_ptr,
        value_block_stride, value_head_stride, value_slot_stride,
        ROWS, TILE, BLOCK_SIZE,
        KEY_DIM, KEY_PAD, KEY_CODES, KEY_SCALES, KEY_GROUPS, KEY_RESIDUAL,
        VALUE_DIM, VALUE_PAD, VALUE_CODES, VALUE_SCALES, VALUE_GROUPS, VALUE_RESIDUAL,
        HAS_SOFTCAP, False,
    )  # fmt: skip

    states = (seq * num_heads + heads) * num_states + shared_states + split
    if IS_SPLIT:
        tl.store(maxima_ptr + states, maximum, mask=real)
        tl.store(totals_ptr + states, total, mask=real)
    else:
        sink = load_sinks(sinks_ptr, heads, real, ROWS, HAS_SINKS)
        accumulator = accumulator * final_weight(maximum, total, sink)[:, None]
    store_rows(out_ptr, states, accumulator, real, VALUE_DIM, VALUE_PAD)


@triton.jit
def merge_kernel(
    partial_ptr, maxima_ptr, totals_ptr, sinks_ptr, out_ptr,
    num_heads, num_splits,
    SPLITS_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # One program merges the splits of one query head of one sequence.
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = seq * num_heads + head
    splits = tl.arange(0, SPLITS_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    present = splits < num_splits
    states = row * num_splits + splits
    maxima = tl.load(maxima_ptr + states, mask=present, other=float("-inf"))
    totals = tl.load(totals_ptr + states, mask=present, other=0.0)
    partials = tl.load(
        partial_ptr + states[:, None] * VALUE_DIM + value_dims[None, :],
        mask=present[:, None] & (value_dims[None, :] < VALUE_DIM),
        other=0.0,
    )
    accumulator, maximum, total = merge_states(partials, maxima, totals)
    sink = float("-inf")
    if HAS_SINKS:
        # Here and in no split: a sink is one more logit of the whole row.
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    out = accumulator * final_weight(maximum, total, sink)
    tl.store(
        out_ptr + row * VALUE_DIM + value_dims,
        out.to(out_ptr.dtype.element_ty),
        mask=value_dims < VALUE_DIM,
    )
