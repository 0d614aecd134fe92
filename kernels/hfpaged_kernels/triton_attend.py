# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""The loop that all attention kernels have in common: query rows of one KV head over positions of one block table."""

import triton
import triton.language as tl

from hfpaged_kernels.triton_blocks import load_slots, lookup_blocks
from hfpaged_kernels.triton_math import attention_scores, fold_in


@triton.jit
def attend_positions(
    query, row_positions, table_ptr, key_cache_ptr, value_cache_ptr, kv_head,
    start_at, visible_from, visible_to, window, scale, softcap,
    key_block_stride, key_head_stride, key_slot_stride,
    value_block_stride, value_head_stride, value_slot_stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROWS_DIFFER: tl.constexpr,
):  # fmt: skip
    """The state (accumulator, maximum, total) of query [ROWS, KEY_PAD] over the positions from start_at on that lie
    in visible_from .. visible_to.

    Where ROWS_DIFFER, the row at position p sees only p - window + 1 .. p of them; row_positions are not read else.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for start in range(start_at, visible_to, TILE):
        positions = start + tl.arange(0, TILE)
        # Blocks before the window may be freed already, slots behind the end hold anything: neither is read.
        wanted = (positions >= visible_from) & (positions < visible_to)
        blocks = lookup_blocks(table_ptr, positions, wanted, BLOCK_SIZE)
        keys = load_slots(
            key_cache_ptr, blocks, positions, kv_head, wanted,
            key_block_stride, key_head_stride, key_slot_stride, BLOCK_SIZE, KEY_DIM, KEY_PAD,
        )  # fmt: skip
        scores = attention_scores(query, keys, scale, softcap, HAS_SOFTCAP)
        seen = wanted[None, :]
        if ROWS_DIFFER:
            distance = row_positions[:, None] - positions[None, :]
            seen = seen & (distance >= 0) & (distance < window)
        scores = tl.where(seen, scores, float("-inf"))
        values = load_slots(
            value_cache_ptr, blocks, positions, kv_head, wanted,
            value_block_stride, value_head_stride, value_slot_stride, BLOCK_SIZE, VALUE_DIM, VALUE_PAD,
        )  # fmt: skip
        accumulator, maximum, total = fold_in(accumulator, maximum, total, scores, values)
    return accumulator, maximum, total
