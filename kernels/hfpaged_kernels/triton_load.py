# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Loads that find positions of a context in their blocks, and dequantize them in registers.

Block ids become int64 before they meet a stride: a cache has more than 2**31 elements sooner than one thinks.

Keys and values are parts of their own, each described by constants (see `triton_launch.part_arguments`):

    DIM, PAD   elements of a row, and those of the tile that holds it
    CODES      how a number is coded, see `triton_codes`
    SCALES     what has a scale: "token" of a head, "channel" of a block, "head" of the layer; "" if nothing has
    GROUPS     into how many parts, each with its scale, the row of a token is cut
    RESIDUAL   whether unfilled blocks lie in residuals
"""

import triton
import triton.language as tl

from hfpaged_kernels.triton_codes import numbers_of


@triton.jit
def lookup_blocks(block_table_ptr, positions, wanted, BLOCK_SIZE: tl.constexpr):
    """The int64 block ids [tile] of `positions`; entries that are not `wanted` are not read."""
    return tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)


@triton.jit
def load_rows(
    cache_ptr, scales_ptr, blocks, positions, head, wanted,
    block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One head of the cache at `positions`: (numbers [tile, PAD], factors [tile] float32), zeros where not `wanted`
    and behind DIM. What is stored is their product; factors are ones where CODES is "native" or "int4".

    Behind another but a multiple of BLOCK_SIZE the positions must not begin (of TILE, if that is smaller).
    """
    heads = blocks * block_stride + head * head_stride
    rows = heads + (positions % BLOCK_SIZE) * slot_stride
    numbers = numbers_of(_load_codes(cache_ptr + rows, wanted, DIM, PAD, CODES), CODES)
    factors = tl.full(wanted.shape, 1.0, tl.float32)
    # The scales of a head of a block lie behind its codes, at an even address.
    scales_at: tl.constexpr = (BLOCK_SIZE * (DIM // 2 if CODES == "int4" else DIM) + 1) // 2 * 2
    if SCALES == "head":
        factors *= tl.load(scales_ptr + head)
    elif SCALES == "channel":
        numbers = _scale_channels(
            cache_ptr + scales_at, numbers, blocks, head, wanted, block_stride, head_stride, BLOCK_SIZE, DIM, PAD
        )
    elif SCALES == "token":
        token_ptr = (cache_ptr + scales_at).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tokens = heads // 2 + positions % BLOCK_SIZE
        if CODES == "int4":
            tokens = heads // 2 + (positions % BLOCK_SIZE) * (2 * GROUPS)
            numbers = _scale_groups(token_ptr + tokens, numbers, wanted, DIM, PAD, GROUPS)
        else:
            factors = tl.load(token_ptr + tokens, mask=wanted, other=0.0).to(tl.float32)
    return numbers, factors


@triton.jit
def find_residual(residuals_ptr, context, BLOCK_SIZE: tl.constexpr, HAS_RESIDUALS: tl.constexpr):
    """(the residual of a sequence, the position from which on it holds its context: `context`, if it has none)."""
    if HAS_RESIDUALS:
        residual = tl.load(residuals_ptr)
        residual_from = tl.where(residual >= 0, context // BLOCK_SIZE * BLOCK_SIZE, context)
    else:
        residual = context
        residual_from = context
    return residual, residual_from


@triton.jit
def load_residual(
    residual_ptr, residual, positions, head, wanted, num_kv_heads,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """As `load_rows`, from residual [.., BLOCK_SIZE, num_kv_heads, DIM]: (numbers [tile, PAD], ones [tile])."""
    slots = residual.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = (slots * num_kv_heads + head) * DIM
    return _load_codes(residual_ptr + rows, wanted, DIM, PAD, "native"), tl.full(wanted.shape, 1.0, tl.float32)


@triton.jit
def load_part(
    cache_ptr, scales_ptr, residual_ptr, blocks, positions, head, wanted, residual, num_kv_heads,
    block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, FROM_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """`load_residual` or `load_rows`, as FROM_RESIDUAL says."""
    if FROM_RESIDUAL:
        numbers, factors = load_residual(
            residual_ptr, residual, positions, head, wanted, num_kv_heads, BLOCK_SIZE, DIM, PAD
        )
    else:
        numbers, factors = load_rows(
            cache_ptr, scales_ptr, blocks, positions, head, wanted,
            block_stride, head_stride, slot_stride, BLOCK_SIZE, DIM, PAD, CODES, SCALES, GROUPS,
        )  # fmt: skip
    return numbers, factors


@triton.jit
def _load_codes(row_ptrs, wanted, DIM: tl.constexpr, PAD: tl.constexpr, CODES: tl.constexpr):
    """[tile, PAD] of rows that begin at row_ptrs [tile]; of "int4" one code in each, of others what is stored."""
    if CODES == "int4":
        places = tl.arange(0, PAD // 2)
        mask = wanted[:, None] & (places[None, :] < DIM // 2)
        pairs = tl.load(row_ptrs[:, None] + places[None, :], mask=mask, other=0)
        codes = tl.interleave(pairs & 15, pairs >> 4)
    else:
        dims = tl.arange(0, PAD)
        mask = wanted[:, None] & (dims[None, :] < DIM)
        codes = tl.load(row_ptrs[:, None] + dims[None, :], mask=mask, other=0)
    return codes


@triton.jit
def _scale_groups(token_ptrs, numbers, wanted, DIM: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """numbers [tile, PAD] times the scale of their group, plus its low; token_ptrs [tile] point to the first scale."""
    SIZE: tl.constexpr = DIM // GROUPS if GROUPS > 1 else PAD
    groups = tl.arange(0, PAD // SIZE)
    mask = wanted[:, None] & (groups[None, :] < GROUPS)
    pair_ptrs = token_ptrs[:, None] + 2 * groups[None, :]
    scales = tl.load(pair_ptrs, mask=mask, other=0.0).to(tl.float32)
    lows = tl.load(pair_ptrs + 1, mask=mask, other=0.0).to(tl.float32)
    grouped = tl.reshape(numbers, [numbers.shape[0], PAD // SIZE, SIZE])
    scaled = tl.reshape(grouped * scales[:, :, None] + lows[:, :, None], numbers.shape)
    if DIM < PAD and GROUPS == 1:
        # Behind DIM is code 0, which stands for the low.
        scaled = tl.where(tl.arange(0, PAD)[None, :] < DIM, scaled, 0.0)
    return scaled


@triton.jit
def _scale_channels(
    scales_ptr, numbers, blocks, head, wanted, block_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """numbers [tile, PAD] times the scale of their channel in their block, plus its low. scales_ptr is that of head 0
    of block 0.
    """
    TILE: tl.constexpr = numbers.shape[0]
    SLOTS: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    BLOCKS: tl.constexpr = TILE // SLOTS
    # The positions of a block follow each other, and where one is not wanted its block id is 0: the largest is right.
    block_ids = tl.max(tl.reshape(blocks, [BLOCKS, SLOTS]), 1)
    wanted_blocks = tl.max(tl.reshape(wanted.to(tl.int32), [BLOCKS, SLOTS]), 1) != 0
    heads = block_ids * block_stride + head * head_stride
    step_ptrs = (scales_ptr + 2 * DIM).to(tl.pointer_type(tl.bfloat16), bitcast=True) + heads // 2
    scale_step = tl.load(step_ptrs, mask=wanted_blocks, other=0.0).to(tl.float32)
    lowest = tl.load(step_ptrs + 1, mask=wanted_blocks, other=0.0).to(tl.float32)
    low_step = tl.load(step_ptrs + 2, mask=wanted_blocks, other=0.0).to(tl.float32)
    dims = tl.arange(0, PAD)
    mask = wanted_blocks[:, None] & (dims[None, :] < DIM)
    code_ptrs = scales_ptr + heads[:, None] + dims[None, :]
    scales = tl.load(code_ptrs, mask=mask, other=0).to(tl.float32) * scale_step[:, None]
    low_codes = tl.load(code_ptrs + DIM, mask=mask, other=0).to(tl.float32)
    lows = tl.where(mask, low_codes * low_step[:, None] + lowest[:, None], 0.0)
    by_block = tl.reshape(numbers, [BLOCKS, SLOTS, PAD])
    scaled = tl.reshape(by_block * scales[:, None, :] + lows[:, None, :], [TILE, PAD])
    # What is not wanted has code 0, which stands for the low.
    return tl.where(wanted[:, None], scaled, 0.0)
