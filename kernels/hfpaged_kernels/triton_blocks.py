# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Kernels that move stored keys and values, and the two loads that find a position in its block.

Block ids become int64 before they meet a stride: a cache has more than 2**31 elements sooner than one thinks.
"""

import triton
import triton.language as tl


@triton.jit
def lookup_blocks(block_table_ptr, positions, wanted, BLOCK_SIZE: tl.constexpr):
    """The int64 block ids [tile] of `positions`; entries that are not `wanted` are not read."""
    return tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)


@triton.jit
def load_slots(
    cache_ptr, blocks, positions, head, wanted,
    block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """One head of the cache at `positions`: [tile, DIM_PAD], zeros where not `wanted` and behind DIM."""
    dims = tl.arange(0, DIM_PAD)
    rows = blocks * block_stride + head * head_stride + (positions % BLOCK_SIZE) * slot_stride
    mask = wanted[:, None] & (dims[None, :] < DIM)
    return tl.load(cache_ptr + rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    key_token_stride, key_head_stride, key_dim_stride,
    value_token_stride, value_head_stride, value_dim_stride,
    key_block_stride, key_cache_head_stride, key_slot_stride,
    value_block_stride, value_cache_head_stride, value_slot_stride,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    # One program stores key and value of one head of one token.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    # Padding tokens have slot -1 and no place in the cache.
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE

        dims = tl.arange(0, KEY_PAD)
        source = key_ptr + token * key_token_stride + head * key_head_stride + dims * key_dim_stride
        target = key_cache_ptr + block * key_block_stride + head * key_cache_head_stride
        key = tl.load(source, mask=dims < KEY_DIM, other=0.0)
        key = key.to(key_cache_ptr.dtype.element_ty)
        tl.store(target + offset * key_slot_stride + dims, key, mask=dims < KEY_DIM)

        dims = tl.arange(0, VALUE_PAD)
        source = value_ptr + token * value_token_stride + head * value_head_stride + dims * value_dim_stride
        target = value_cache_ptr + block * value_block_stride + head * value_cache_head_stride
        value = tl.load(source, mask=dims < VALUE_DIM, other=0.0)
        value = value.to(value_cache_ptr.dtype.element_ty)
        tl.store(target + offset * value_slot_stride + dims, value, mask=dims < VALUE_DIM)


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
    cache_ptr, block_tables_ptr, lengths_ptr, dense_ptr,
    longest, table_stride, block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program fills TILE positions of one head of one sequence of the dense view.
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    positions = tl.program_id(2) * TILE + tl.arange(0, TILE)
    stored = positions < tl.load(lengths_ptr + seq)
    blocks = lookup_blocks(block_tables_ptr + seq * table_stride, positions, stored, BLOCK_SIZE)
    # load_slots gives zeros where nothing is stored, which is what the dense view shall hold there.
    rows = load_slots(
        cache_ptr, blocks, positions, head, stored,
        block_stride, head_stride, slot_stride, BLOCK_SIZE, DIM, DIM_PAD,
    )  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    targets = ((seq * num_heads + head) * longest + positions) * DIM
    mask = (positions[:, None] < longest) & (dims[None, :] < DIM)
    tl.store(dense_ptr + targets[:, None] + dims[None, :], rows, mask=mask)
