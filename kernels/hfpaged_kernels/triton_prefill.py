# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Causal attention of ragged query tokens over their paged context."""

import triton
import triton.language as tl

from hfpaged_kernels.triton_attend import attend_positions
from hfpaged_kernels.triton_load import find_residual
from hfpaged_kernels.triton_math import final_weight
from hfpaged_kernels.triton_rows import load_rows, load_sinks, store_rows


@triton.jit
def find_sequence(tile_ends_ptr, tile, num_seqs):
    """The sequence that query tile `tile` belongs to, num_seqs if none: how many end at or before it."""
    seq = 0
    for first in range(0, num_seqs, 128):
        seqs = first + tl.arange(0, 128)
        ends = tl.load(tile_ends_ptr + seqs, mask=seqs < num_seqs, other=2147483647)
        seq += tl.sum((ends <= tile).to(tl.int32), 0)
    return seq


@triton.jit
def prefill_kernel(
    query_ptr, block_tables_ptr, context_lengths_ptr, residuals_ptr, sinks_ptr,
    query_starts_ptr, query_lengths_ptr, tile_ends_ptr, out_ptr,
    num_seqs, num_heads, window, scale, softcap,
    query_token_stride, query_head_stride, table_stride,
    key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
    value_cache_ptr, value_scales_ptr, value_residual_ptr, value_block_stride, value_head_stride, value_slot_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    KEY_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, KEY_GROUPS: tl.constexpr, KEY_RESIDUAL: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, VALUE_GROUPS: tl.constexpr, VALUE_RESIDUAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    # One program attends for ROWS // HEADS query tokens of one sequence and HEADS query heads of one KV head.
    # Tiles are numbered through all sequences: tile_ends[s] is the first tile behind sequence s.
    TOKENS: tl.constexpr = ROWS // HEADS
    seq = find_sequence(tile_ends_ptr, tl.program_id(0), num_seqs)
    # The grid has room for the worst split of the tokens into sequences, so some programs find no work.
    if seq >= num_seqs:
        return
    query_start = tl.load(query_starts_ptr + seq).to(tl.int64)
    query_length = tl.load(query_lengths_ptr + seq)
    context = tl.load(context_lengths_ptr + seq)
    first_tile = tl.load(tile_ends_ptr + seq) - tl.cdiv(query_length, TOKENS)
    first_token = (tl.program_id(0) - first_tile) * TOKENS

    chunks_per_group: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = (tl.program_id(1) // chunks_per_group).to(tl.int64)
    in_group = (tl.program_id(1) % chunks_per_group) * HEADS + tl.arange(0, ROWS) % HEADS
    heads = kv_head * GROUP + in_group
    tokens = first_token + tl.arange(0, ROWS) // HEADS
    real = (in_group < GROUP) & (tokens < query_length)

    residual, residual_from = find_residual(residuals_ptr + seq, context, BLOCK_SIZE, KEY_RESIDUAL or VALUE_RESIDUAL)
    query_rows = (query_start + tokens) * query_token_stride + heads * query_head_stride
    query = load_rows(query_ptr, query_rows, real, KEY_DIM, KEY_PAD)
    query_positions = context - query_length + tokens
    first_position = context - query_length + first_token
    visible_from = tl.maximum(first_position - window + 1, 0)
    visible_to = tl.minimum(first_position + TOKENS, context)

    accumulator, maximum, total = attend_positions(
        query, query_positions, block_tables_ptr + seq.to(tl.int64) * table_stride, kv_head, num_heads // GROUP,
        residual, residual_from, visible_from // TILE * TILE, visible_from, visible_to, window, scale, softcap,
        key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
        value_cache_ptr, value_scales_ptr, value_residual_ptr,
        value_block_stride, value_head_stride, value_slot_stride,
        ROWS, TILE, BLOCK_SIZE,
        KEY_DIM, KEY_PAD, KEY_CODES, KEY_SCALES, KEY_GROUPS, KEY_RESIDUAL,
        VALUE_DIM, VALUE_PAD, VALUE_CODES, VALUE_SCALES, VALUE_GROUPS, VALUE_RESIDUAL,
        HAS_SOFTCAP, True,
    )  # fmt: skip

    sink = load_sinks(sinks_ptr, heads, real, ROWS, HAS_SINKS)
    accumulator = accumulator * final_weight(maximum, total, sink)[:, None]
    store_rows(out_ptr, (query_start + tokens) * num_heads + heads, accumulator, real, VALUE_DIM, VALUE_PAD)
