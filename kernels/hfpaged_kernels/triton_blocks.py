# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Kernels that move stored keys and values: copies of whole blocks, and the dense view."""

import triton
import triton.language as tl

from hfpaged_kernels.triton_load import find_residual, load_residual, load_rows, lookup_blocks


@triton.jit
def copy_blocks_kernel(
    source_ptr, target_ptr, source_ids_ptr, target_ids_ptr,
    source_block_stride, source_head_stride, source_slot_stride,
    target_block_stride, target_head_stride, target_slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program copies one head of one block, TILE slots at a time.
    copy = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(source_ids_ptr + copy).to(tl.int64)
    target = tl.load(target_ids_ptr + copy).to(tl.int64)
    source_ptr += source * source_block_stride + head * source_head_stride
    target_ptr += target * target_block_stride + head * target_head_stride
    dims = tl.arange(0, DIM_PAD)
    for first in range(0, BLOCK_SIZE, TILE):
        slots = first + tl.arange(0, TILE)
        mask = (slots[:, None] < BLOCK_SIZE) & (dims[None, :] < DIM)
        rows = tl.load(source_ptr + slots[:, None] * source_slot_stride + dims[None, :], mask=mask)
        tl.store(target_ptr + slots[:, None] * target_slot_stride + dims[None, :], rows, mask=mask)


@triton.jit
def gather_kernel(
    block_tables_ptr, lengths_ptr, residuals_ptr, dense_ptr, longest, table_stride,
    cache_ptr, scales_ptr, residual_ptr, block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program fills TILE positions of one head of one sequence of the dense view.
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    positions = tl.program_id(2) * TILE + tl.arange(0, TILE)
    length = tl.load(lengths_ptr + seq)
    residual, residual_from = find_residual(residuals_ptr + seq, length, BLOCK_SIZE, RESIDUAL)
    stored = positions < residual_from
    blocks = lookup_blocks(block_tables_ptr + seq * table_stride, positions, stored, BLOCK_SIZE)
    # Zeros where nothing is stored, which is what the dense view shall hold there.
    rows, factors = load_rows(
        cache_ptr, scales_ptr, blocks, positions, head, stored,
        block_stride, head_stride, slot_stride, BLOCK_SIZE, DIM, PAD, CODES, SCALES, GROUPS,
    )  # fmt: skip
    if SCALES == "token" or SCALES == "head":
        rows = rows.to(tl.float32) * factors[:, None]
    if RESIDUAL:
        in_residual = (positions >= residual_from) & (positions < length)
        newest, _ = load_residual(residual_ptr, residual, positions, head, in_residual, num_heads, BLOCK_SIZE, DIM, PAD)
        rows = tl.where(in_residual[:, None], newest.to(tl.float32), rows.to(tl.float32))
    dims = tl.arange(0, PAD)
    targets = ((seq * num_heads + head) * longest + positions) * DIM
    mask = (positions[:, None] < longest) & (dims[None, :] < DIM)
    tl.store(dense_ptr + targets[:, None] + dims[None, :], rows.to(dense_ptr.dtype.element_ty), mask=mask)
