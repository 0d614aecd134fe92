# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""The part of decode that sequences with a common prefix share: its blocks are read once for many query rows.

As in Juravsky et al. 2024, "Hydragen", arXiv 2402.05099: what comes out are more splits for the merge of decode.
"""

import triton
import triton.language as tl

from hfpaged_kernels.triton_attend import attend_positions
from hfpaged_kernels.triton_rows import load_rows, store_rows


@triton.jit
def first_with_tokens(context_lengths_ptr, num_seqs):
    """The first sequence that is not empty, num_seqs if none is."""
    found = num_seqs
    for first in range(0, num_seqs, 128):
        seqs = first + tl.arange(0, 128)
        lengths = tl.load(context_lengths_ptr + seqs, mask=seqs < num_seqs, other=0)
        found = tl.minimum(found, tl.min(tl.where(lengths > 0, seqs, num_seqs), 0))
    return found


@triton.jit
def shared_kernel(
    query_ptr, block_tables_ptr, context_lengths_ptr,
    partial_ptr, maxima_ptr, totals_ptr,
    num_seqs, num_heads, num_states, shared, window, scale, softcap,
    query_token_stride, query_head_stride, table_stride,
    key_cache_ptr, key_scales_ptr, key_block_stride, key_head_stride, key_slot_stride,
    value_cache_ptr, value_scales_ptr, value_block_stride, value_head_stride, value_slot_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    KEY_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, KEY_GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    # One program attends for ROWS query rows of one KV head (all sequences' rows in turn) over one split of the
    # first `shared` positions. Its states are the first of num_states; decode_kernel adds those of the rest.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    seqs = (row // GROUP).to(tl.int64)
    heads = kv_head * GROUP + row % GROUP
    real = seqs < num_seqs
    lengths = tl.load(context_lengths_ptr + seqs, mask=real, other=0)

    # Any table that is not empty will do; where there is none, nothing is visible.
    reader = first_with_tokens(context_lengths_ptr, num_seqs)
    end = tl.where(reader < num_seqs, shared, 0)
    # Whole tiles per split, so that no tile is read by two programs.
    split_length = tl.cdiv(tl.cdiv(shared, tl.num_programs(2)), TILE) * TILE
    first = split * split_length
    last = tl.minimum(first + split_length, end)

    query = load_rows(query_ptr, seqs * query_token_stride + heads * query_head_stride, real, KEY_DIM, KEY_PAD)
    # Every row sees all of it, save those of empty sequences, which are at position -1.
    accumulator, maximum, total = attend_positions(
        query, lengths - 1, block_tables_ptr + reader.to(tl.int64) * table_stride, kv_head, num_heads // GROUP,
        # Shared blocks are full, so none of them lies in a residual.
        -1, end, first, first, last, window, scale, softcap,
        key_cache_ptr, key_scales_ptr, key_cache_ptr, key_block_stride, key_head_stride, key_slot_stride,
        value_cache_ptr, value_scales_ptr, value_cache_ptr, value_block_stride, value_head_stride, value_slot_stride,
        ROWS, TILE, BLOCK_SIZE,
        KEY_DIM, KEY_PAD, KEY_CODES, KEY_SCALES, KEY_GROUPS, False,
        VALUE_DIM, VALUE_PAD, VALUE_CODES, VALUE_SCALES, VALUE_GROUPS, False,
        HAS_SOFTCAP, True,
    )  # fmt: skip

    states = (seqs * num_heads + heads) * num_states + split
    tl.store(maxima_ptr + states, maximum, mask=real)
    tl.store(totals_ptr + states, total, mask=real)
    store_rows(partial_ptr, states, accumulator, real, VALUE_DIM, VALUE_PAD)
