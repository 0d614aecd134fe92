"""Writing, copying and gathering blocks on CPU. Addresses are integers, strides are bytes."""

from __future__ import annotations

import numpy as np

from hfpaged_kernels.cpu_bits import (
    FLOAT32,
    LANES,
    clear_bytes,
    convert,
    copy_bytes,
    keep,
    load_int32,
    load_int64,
    padded,
    size_of,
)
from hfpaged_kernels.cpu_dequantizing import has_factors, scale_rows
from hfpaged_kernels.cpu_kept import kept
from hfpaged_kernels.cpu_records import DIM, HEAD, describe_head, get
from hfpaged_kernels.cpu_strips import read_strip


@kept(nogil=True)
def write_rows(
    source: int, source_kind: int, token_stride: int, source_head_stride: int,
    cache: int, cache_kind: int, block_stride: int, cache_head_stride: int, row_bytes: int,
    slots: int, num_tokens: int, num_heads: int, dim: int, block_size: int,
) -> None:  # fmt: skip
    """Store each token's heads at its slot; a negative slot is skipped."""
    for token in range(num_tokens):
        slot = load_int64(slots + 8 * token)
        if slot < 0:
            continue
        block = slot // block_size
        target = cache + block * block_stride + (slot - block * block_size) * row_bytes
        row = source + token * token_stride
        for head in range(num_heads):
            convert(
                row + head * source_head_stride, source_kind,
                target + head * cache_head_stride, cache_kind, dim,
            )  # fmt: skip


@kept(nogil=True)
def overlap(sources: int, targets: int, count: int) -> bool:
    """Whether a block is both read and written, so that the order of the copies would matter."""
    for i in range(count):
        target = load_int64(targets + 8 * i)
        for j in range(count):
            if load_int64(sources + 8 * j) == target:
                return True
    return False


@kept(nogil=True)
def copy_whole_blocks(cache: int, block_stride: int, block_bytes: int, sources: int, targets: int, count: int) -> None:
    """Copy blocks one after the other; no block is both a source and a target."""
    for i in range(count):
        target = cache + load_int64(targets + 8 * i) * block_stride
        copy_bytes(target, cache + load_int64(sources + 8 * i) * block_stride, block_bytes)


@kept(nogil=True)
def gather_rows(
    cache: int, block_stride: int, head_stride: int, row_bytes: int, block_size: int, num_heads: int,
    tables: int, table_stride: int, lengths: int, num_seqs: int, out: int, longest: int,
) -> None:  # fmt: skip
    """Each head's rows of each sequence, one after the other, into [num_seqs, num_heads, longest] rows."""
    for item in range(num_seqs * num_heads):
        seq = item // num_heads
        head = cache + (item - seq * num_heads) * head_stride
        length = load_int32(lengths + 4 * seq)
        target = out + item * longest * row_bytes
        for start in range(0, length, block_size):
            block = load_int32(tables + seq * table_stride + start // block_size * 4)
            rows = min(block_size, length - start)
            copy_bytes(target + start * row_bytes, head + block * block_stride, rows * row_bytes)
        clear_bytes(target + length * row_bytes, (longest - length) * row_bytes)


@kept(nogil=True)
def gather_quantized(
    cache: int, num_heads: int, tables: int, table_stride: int, lengths: int, residuals: int, num_seqs: int, out: int,
    out_kind: int, longest: int,
) -> None:  # fmt: skip
    """As `gather_rows`, of a record of a quantized cache, dequantized in strips of sixteen rows."""
    dim = get(cache, DIM)
    width, row_bytes = padded(dim), dim * size_of(out_kind)
    record, memory = np.empty(HEAD, dtype=np.int64), np.empty(LANES * (width + 1), dtype=np.float32)
    head, buffer = record.ctypes.data, memory.ctypes.data
    factors = buffer + 4 * LANES * width
    for item in range(num_seqs * num_heads):
        seq = item // num_heads
        length = load_int32(lengths + 4 * seq)
        residual = load_int32(residuals + 4 * seq) if residuals != 0 else -1
        describe_head(cache, item - seq * num_heads, residual, length, head)
        target = out + item * longest * row_bytes
        for start in range(0, length, LANES):
            rows = min(LANES, length - start)
            read_strip(head, tables + seq * table_stride, start, rows, buffer, factors)
            if has_factors(head):
                scale_rows(buffer, width, rows, factors)
            for row in range(rows):
                convert(buffer + 4 * row * width, FLOAT32, target + (start + row) * row_bytes, out_kind, dim)
        clear_bytes(target + length * row_bytes, (longest - length) * row_bytes)
    keep(record)
    keep(memory)
