# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""The loop that all attention kernels have in common: query rows of one KV head over positions of one block table.

The constants of the parts, KEY_... and VALUE_..., are those of `triton_load`.
"""

import triton
import triton.language as tl

from hfpaged_kernels.triton_load import load_part, lookup_blocks
from hfpaged_kernels.triton_math import attention_scores, fold_in


@triton.jit
def attend_positions(
    query, row_positions, table_ptr, kv_head, num_kv_heads, residual, residual_from,
    start_at, visible_from, visible_to, window, scale, softcap,
    key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
    value_cache_ptr, value_scales_ptr, value_residual_ptr, value_block_stride, value_head_stride, value_slot_stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    KEY_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, KEY_GROUPS: tl.constexpr, KEY_RESIDUAL: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, VALUE_GROUPS: tl.constexpr, VALUE_RESIDUAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROWS_DIFFER: tl.constexpr,
):  # fmt: skip
    """The state (accumulator, maximum, total) of query [ROWS, KEY_PAD] over the positions from start_at on that lie
    in visible_from .. visible_to.

    Where ROWS_DIFFER, the row at position p sees only p - window + 1 .. p of them; row_positions are not read else.
    From the position residual_from on, the parts that have residuals lie in that one named `residual`.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    has_residual: tl.constexpr = KEY_RESIDUAL or VALUE_RESIDUAL
    blocks_to = visible_to
    if has_residual:
        blocks_to = tl.minimum(visible_to, residual_from)
    for start in range(start_at, blocks_to, TILE):
        accumulator, maximum, total = _attend_tile(
            accumulator, maximum, total,
            query, row_positions, table_ptr, kv_head, num_kv_heads, residual,
            start, visible_from, blocks_to, window, scale, softcap,
            key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
            value_cache_ptr, value_scales_ptr, value_residual_ptr,
            value_block_stride, value_head_stride, value_slot_stride,
            TILE, BLOCK_SIZE,
            KEY_DIM, KEY_PAD, KEY_CODES, KEY_SCALES, KEY_GROUPS, False,
            VALUE_DIM, VALUE_PAD, VALUE_CODES, VALUE_SCALES, VALUE_GROUPS, False,
            HAS_SOFTCAP, ROWS_DIFFER,
        )  # fmt: skip
    if has_residual:
        # A loop of its own, of a few positions, so that the one over the blocks asks for nothing twice.
        for start in range(tl.maximum(start_at, residual_from), visible_to, TILE):
            accumulator, maximum, total = _attend_tile(
                accumulator, maximum, total,
                query, row_positions, table_ptr, kv_head, num_kv_heads, residual,
                start, visible_from, visible_to, window, scale, softcap,
                key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
                value_cache_ptr, value_scales_ptr, value_residual_ptr,
                value_block_stride, value_head_stride, value_slot_stride,
                TILE, BLOCK_SIZE,
                KEY_DIM, KEY_PAD, KEY_CODES, KEY_SCALES, KEY_GROUPS, KEY_RESIDUAL,
                VALUE_DIM, VALUE_PAD, VALUE_CODES, VALUE_SCALES, VALUE_GROUPS, VALUE_RESIDUAL,
                HAS_SOFTCAP, ROWS_DIFFER,
            )  # fmt: skip
    return accumulator, maximum, total


@triton.jit
def _attend_tile(
    accumulator, maximum, total,
    query, row_positions, table_ptr, kv_head, num_kv_heads, residual,
    start, visible_from, visible_to, window, scale, softcap,
    key_cache_ptr, key_scales_ptr, key_residual_ptr, key_block_stride, key_head_stride, key_slot_stride,
    value_cache_ptr, value_scales_ptr, value_residual_ptr, value_block_stride, value_head_stride, value_slot_stride,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    KEY_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, KEY_GROUPS: tl.constexpr, KEY_FROM_RESIDUAL: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    VALUE_FROM_RESIDUAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROWS_DIFFER: tl.constexpr,
):  # fmt: skip
    """The state with the positions start .. start + TILE folded in."""
    positions = start + tl.arange(0, TILE)
    # Blocks before the window may be freed already, slots behind the end hold anything: neither is read.
    wanted = (positions >= visible_from) & (positions < visible_to)
    if KEY_FROM_RESIDUAL and VALUE_FROM_RESIDUAL:
        blocks = positions.to(tl.int64)
    else:
        blocks = lookup_blocks(table_ptr, positions, wanted, BLOCK_SIZE)
    keys, key_factors = load_part(
        key_cache_ptr, key_scales_ptr, key_residual_ptr, blocks, positions, kv_head, wanted, residual, num_kv_heads,
        key_block_stride, key_head_stride, key_slot_stride,
        BLOCK_SIZE, KEY_DIM, KEY_PAD, KEY_CODES, KEY_SCALES, KEY_GROUPS, KEY_FROM_RESIDUAL,
    )  # fmt: skip
    # Codes are exact in every dtype of a query, so their scales may wait for the scores.
    has_factors: tl.constexpr = not KEY_FROM_RESIDUAL and (KEY_SCALES == "head" or KEY_SCALES == "token")
    scores = attention_scores(query, keys.to(query.dtype), key_factors, scale, softcap, has_factors, HAS_SOFTCAP)
    seen = wanted[None, :]
    if ROWS_DIFFER:
        distance = row_positions[:, None] - positions[None, :]
        seen = seen & (distance >= 0) & (distance < window)
    scores = tl.where(seen, scores, float("-inf"))
    values, value_factors = load_part(
        value_cache_ptr, value_scales_ptr, value_residual_ptr, blocks, positions, kv_head, wanted,
        residual, num_kv_heads,
        value_block_stride, value_head_stride, value_slot_stride,
        BLOCK_SIZE, VALUE_DIM, VALUE_PAD, VALUE_CODES, VALUE_SCALES, VALUE_GROUPS, VALUE_FROM_RESIDUAL,
    )  # fmt: skip
    weighted: tl.constexpr = not VALUE_FROM_RESIDUAL and (VALUE_SCALES == "head" or VALUE_SCALES == "token")
    if weighted and query.dtype == tl.float16:
        # Weight times scale may be too small a number for float16.
        values = values.to(tl.float32) * value_factors[:, None]
    return fold_in(
        accumulator, maximum, total, scores, values.to(query.dtype), value_factors,
        weighted and query.dtype != tl.float16,
    )  # fmt: skip
