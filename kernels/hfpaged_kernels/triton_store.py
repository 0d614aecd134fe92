# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton reads the annotations of its functions and knows no others than tl.constexpr.
"""Kernels that store new keys and values, quantized where the cache is: what `quantizing` says, bit by bit.

They are launched without the fusion of products and sums, which would round once where the judge rounds twice.
"""

import triton
import triton.language as tl

from hfpaged_kernels.triton_codes import codes_of, down, inverse, largest_of, smallest_of, up


@triton.jit
def write_kv_kernel(
    new_key_ptr, new_value_ptr, slots_ptr,
    new_key_token_stride, new_key_head_stride, new_key_dim_stride,
    new_value_token_stride, new_value_head_stride, new_value_dim_stride,
    key_cache_ptr, key_scales_ptr, key_block_stride, key_head_stride, key_slot_stride,
    value_cache_ptr, value_scales_ptr, value_block_stride, value_head_stride, value_slot_stride,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    KEY_CODES: tl.constexpr, KEY_SCALES: tl.constexpr, KEY_GROUPS: tl.constexpr, KEY_LARGEST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_SCALES: tl.constexpr, VALUE_GROUPS: tl.constexpr, VALUE_LARGEST: tl.constexpr,
):  # fmt: skip
    # One program stores key and value of one head of one token.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    # Padding tokens have slot -1 and no place in the cache.
    if slot >= 0:
        _store_token(
            new_key_ptr + token * new_key_token_stride + head * new_key_head_stride, new_key_dim_stride,
            key_cache_ptr, key_scales_ptr, slot, head, key_block_stride, key_head_stride, key_slot_stride,
            BLOCK_SIZE, KEY_DIM, KEY_PAD, KEY_CODES, KEY_SCALES, KEY_GROUPS, KEY_LARGEST,
        )  # fmt: skip
        _store_token(
            new_value_ptr + token * new_value_token_stride + head * new_value_head_stride, new_value_dim_stride,
            value_cache_ptr, value_scales_ptr, slot, head, value_block_stride, value_head_stride, value_slot_stride,
            BLOCK_SIZE, VALUE_DIM, VALUE_PAD, VALUE_CODES, VALUE_SCALES, VALUE_GROUPS, VALUE_LARGEST,
        )  # fmt: skip


@triton.jit
def write_blocks_kernel(
    rows_ptr, blocks_ptr, sources_ptr, row_stride, rows_head_stride, dim_stride,
    cache_ptr, scales_ptr, block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # One program quantizes one head of one block, TILE rows at a time.
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    rows_ptr += head * rows_head_stride
    sources_ptr += index * BLOCK_SIZE
    head_ptr = cache_ptr + tl.load(blocks_ptr + index).to(tl.int64) * block_stride + head * head_stride
    if SCALES == "channel":
        _store_channels(
            rows_ptr, sources_ptr, row_stride, dim_stride, head_ptr, slot_stride,
            BLOCK_SIZE, DIM, PAD, CODES, LARGEST, TILE,
        )  # fmt: skip
    else:
        for first in range(0, BLOCK_SIZE, TILE):
            slots = first + tl.arange(0, TILE)
            rows = _load_rows(rows_ptr, sources_ptr + slots, row_stride, dim_stride, DIM, PAD)
            _store_tokens(
                rows, head_ptr, scales_ptr + head, slots, slot_stride,
                BLOCK_SIZE, DIM, PAD, CODES, SCALES, GROUPS, LARGEST,
            )  # fmt: skip


@triton.jit
def _store_token(
    row_ptr, dim_stride, cache_ptr, scales_ptr, slot, head, block_stride, head_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store the row at row_ptr in one head of the slot."""
    dims = tl.arange(0, PAD)
    head_ptr = cache_ptr + slot // BLOCK_SIZE * block_stride + head * head_stride
    row = tl.load(row_ptr + dims * dim_stride, mask=dims < DIM, other=0.0)
    if CODES == "native":
        target = head_ptr + slot % BLOCK_SIZE * slot_stride
        tl.store(target + dims, row.to(cache_ptr.dtype.element_ty), mask=dims < DIM)
    else:
        slots = slot % BLOCK_SIZE + tl.arange(0, 1)
        _store_tokens(
            row.to(tl.float32)[None, :], head_ptr, scales_ptr + head, slots, slot_stride,
            BLOCK_SIZE, DIM, PAD, CODES, SCALES, GROUPS, LARGEST,
        )  # fmt: skip


@triton.jit
def _load_rows(rows_ptr, source_ptrs, row_stride, dim_stride, DIM: tl.constexpr, PAD: tl.constexpr):
    """float32 [tile, PAD] of the rows whose numbers lie at source_ptrs [tile]."""
    dims = tl.arange(0, PAD)
    sources = tl.load(source_ptrs).to(tl.int64)
    rows = rows_ptr + sources[:, None] * row_stride + dims[None, :] * dim_stride
    return tl.load(rows, mask=dims[None, :] < DIM, other=0.0).to(tl.float32)


@triton.jit
def _store_tokens(
    rows, head_ptr, head_scale_ptr, slots, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Quantize float32 rows [tile, PAD], zeros behind DIM, each by itself, into `slots` of the head at head_ptr."""
    scales_at: tl.constexpr = (BLOCK_SIZE * (DIM // 2 if CODES == "int4" else DIM) + 1) // 2 * 2
    scale_ptrs = (head_ptr + scales_at).to(tl.pointer_type(tl.uint16), bitcast=True)
    if SCALES == "head":
        codes = codes_of(rows * tl.div_rn(1.0, tl.load(head_scale_ptr)), LARGEST, CODES)
    elif CODES == "int4":
        SIZE: tl.constexpr = DIM // GROUPS if GROUPS > 1 else PAD
        shape: tl.constexpr = (rows.shape[0], PAD // SIZE, SIZE)
        dims = tl.reshape(tl.broadcast_to(tl.arange(0, PAD)[None, :], rows.shape), shape)
        grouped = tl.reshape(rows, shape)
        low, low_bits = down(smallest_of(tl.where(dims < DIM, grouped, float("inf")), 2))
        highest = largest_of(tl.where(dims < DIM, grouped, float("-inf")), 2)
        scale, scale_bits = up((highest - low) * (1 / LARGEST))
        codes = codes_of((grouped - low[:, :, None]) * inverse(scale)[:, :, None], LARGEST, CODES)
        codes = tl.reshape(codes, rows.shape)
        groups = tl.arange(0, PAD // SIZE)
        pair_ptrs = scale_ptrs + 2 * (slots[:, None] * GROUPS + groups[None, :])
        tl.store(pair_ptrs, scale_bits, mask=groups[None, :] < GROUPS)
        tl.store(pair_ptrs + 1, low_bits, mask=groups[None, :] < GROUPS)
    else:
        scale, scale_bits = up(largest_of(tl.abs(rows), 1) * (1 / LARGEST))
        codes = codes_of(rows * inverse(scale)[:, None], LARGEST, CODES)
        tl.store(scale_ptrs + slots, scale_bits)
    _store_codes(codes, head_ptr + slots * slot_stride, DIM, PAD, CODES)


@triton.jit
def _store_channels(
    rows_ptr, sources_ptr, row_stride, dim_stride, head_ptr, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CODES: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantize the block whose rows are numbered at sources_ptr, each channel by itself, into the head at head_ptr."""
    dims = tl.arange(0, PAD)
    real = dims < DIM
    lowest = tl.full([PAD], float("inf"), tl.float32)
    highest = tl.full([PAD], float("-inf"), tl.float32)
    for first in range(0, BLOCK_SIZE, TILE):
        rows = _load_rows(rows_ptr, sources_ptr + first + tl.arange(0, TILE), row_stride, dim_stride, DIM, PAD)
        lowest = tl.minimum(lowest, smallest_of(rows, 0), propagate_nan=tl.PropagateNan.ALL)
        highest = tl.maximum(highest, largest_of(rows, 0), propagate_nan=tl.PropagateNan.ALL)
    base, base_bits = down(smallest_of(tl.where(real, lowest, float("inf")), 0))
    top = largest_of(tl.where(real, lowest, float("-inf")), 0)
    low_step, low_step_bits = up((top - base) * (1 / 255))
    low_codes = _within_byte(tl.floor((lowest - base) * inverse(low_step)))
    lows = low_codes * low_step + base
    scales = (highest - lows) * (1 / LARGEST)
    scale_step, scale_step_bits = up(largest_of(tl.where(real, scales, float("-inf")), 0) * (1 / 255))
    scale_codes = _within_byte(tl.ceil(scales * inverse(scale_step)))
    inverses = inverse(scale_codes * scale_step)
    for first in range(0, BLOCK_SIZE, TILE):
        slots = first + tl.arange(0, TILE)
        rows = _load_rows(rows_ptr, sources_ptr + slots, row_stride, dim_stride, DIM, PAD)
        codes = codes_of((rows - lows[None, :]) * inverses[None, :], LARGEST, CODES)
        _store_codes(codes, head_ptr + slots * slot_stride, DIM, PAD, CODES)
    code_ptr = head_ptr + (BLOCK_SIZE * (DIM // 2 if CODES == "int4" else DIM) + 1) // 2 * 2
    tl.store(code_ptr + dims, scale_codes.to(tl.uint8), mask=real)
    tl.store(code_ptr + DIM + dims, low_codes.to(tl.uint8), mask=real)
    step_ptr = (code_ptr + 2 * DIM).to(tl.pointer_type(tl.uint16), bitcast=True)
    tl.store(step_ptr, scale_step_bits)
    tl.store(step_ptr + 1, base_bits)
    tl.store(step_ptr + 2, low_step_bits)
    tl.store(step_ptr + 3, tl.zeros_like(base_bits))


@triton.jit
def _within_byte(x):
    """float32 cut off at 0 and 255, 0 for a NaN."""
    return tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), 0.0), 255.0)


@triton.jit
def _store_codes(codes, row_ptrs, DIM: tl.constexpr, PAD: tl.constexpr, CODES: tl.constexpr):
    """Store codes [tile, PAD] in rows that begin at row_ptrs [tile]; those of "int4" two to a byte."""
    if CODES == "int4":
        first, second = tl.split(tl.reshape(codes, [codes.shape[0], PAD // 2, 2]))
        places = tl.arange(0, PAD // 2)
        tl.store(row_ptrs[:, None] + places[None, :], first | (second << 4), mask=places[None, :] < DIM // 2)
    else:
        dims = tl.arange(0, PAD)
        tl.store(row_ptrs[:, None] + dims[None, :], codes, mask=dims[None, :] < DIM)
