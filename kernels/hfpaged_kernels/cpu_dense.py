"""Prefill by way of torch's own attention: where the CPU multiplies bfloat16 matrices in hardware (AMX), a dense
copy of the context and `scaled_dot_product_attention` beat the paged kernel by a factor of two for long runs.

In float32, and for a few new tokens behind a long past, the paged kernel is the faster one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hfpaged_kernels import reference
from hfpaged_kernels.quantized import Cache, QuantizedCache

# New tokens per sequence from which the dense copy pays.
LONG_RUN = 32


def dense_is_faster(query: Tensor, keys: Cache, values: Cache, num_seqs: int, plain: bool) -> bool:
    """`plain`: no window, no softcap, no sinks, which torch's attention does not know or slows down by.

    Never for quantized caches, of which there shall be no dense copy.
    """
    all_bfloat16 = {query.dtype, keys.dtype, values.dtype} == {torch.bfloat16}
    quantized = isinstance(keys, QuantizedCache) or isinstance(values, QuantizedCache)
    return plain and all_bfloat16 and not quantized and query.shape[0] >= LONG_RUN * num_seqs and _has_matrix_unit()


def prefill(
    query: Tensor, key_cache: Cache, value_cache: Cache, block_tables: Tensor, context_lengths: Tensor,
    query_starts: Tensor, query_lengths: Tensor, *, scale: float, gather: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """As `reference.prefill`, one sequence after the other."""
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[3])
    spans = zip(query_starts.tolist(), query_lengths.tolist(), context_lengths.tolist(), strict=True)
    for seq, (start, length, context) in enumerate(spans):
        if length == 0:
            continue
        one = block_tables[seq : seq + 1], context_lengths[seq : seq + 1]
        keys, values = gather(key_cache, *one), gather(value_cache, *one)
        fresh = length == context
        mask = None if fresh else reference.visible(length, context, None, query.device)
        rows = query[start : start + length].transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, is_causal=fresh, scale=scale, enable_gqa=True
        )
        out[start : start + length] = attended[0].transpose(0, 1)
    return out


@functools.cache
def _has_matrix_unit() -> bool:
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported and supported())
