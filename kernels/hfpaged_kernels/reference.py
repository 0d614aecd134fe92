"""Every operation in plain torch, obvious and slow: the judge of all other forms.

Shapes, the same in every form of the kernels:

    key_cache     [num_blocks, num_kv_heads, block_size, key_dim]
    value_cache   [num_blocks, num_kv_heads, block_size, value_dim]
    block_tables  [num_seqs, max_blocks] int32; ids behind the end of a sequence are never read
    query         [num_tokens, num_heads, key_dim]
    slots         [num_tokens] int64: block id * block_size + offset, or -1 for a token that is not stored

    residuals     [num_seqs] int32: where a cache keeps blocks that are not full yet (see `QuantizedCache`), which of
                  them holds the last, unfilled block of each sequence; -1: it lies in its block. None: all do

`num_heads` is a multiple of `num_kv_heads`; query head h reads KV head h // (num_heads // num_kv_heads). Each cache may
be a `QuantizedCache` instead of a tensor, keys and values each in an encoding of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfpaged_kernels import quantizing
from hfpaged_kernels.quantized import Cache, QuantizedCache, data_of


def write_kv(key: Tensor, value: Tensor, key_cache: Cache, value_cache: Cache, slots: Tensor) -> None:
    """Store token t of `key` and `value` ([num_tokens, num_kv_heads, dim]) at slots[t]; -1 is skipped."""
    for rows, cache in ((key, key_cache), (value, value_cache)):
        if isinstance(cache, QuantizedCache):
            quantizing.write_tokens(rows, cache, slots)
        else:
            kept = slots >= 0
            blocks, offsets = slots[kept] // cache.shape[2], slots[kept] % cache.shape[2]
            cache[blocks, :, offsets] = rows[kept].to(cache.dtype)


def write_blocks(rows: Tensor, cache: QuantizedCache, blocks: Tensor, sources: Tensor) -> None:
    """Quantize whole blocks: token t of block blocks[i] (int64 [num_blocks]) becomes row sources[i, t] (int64
    [num_blocks, block_size]) of `rows` [num_rows, num_kv_heads, dim].
    """
    quantizing.write_blocks(rows, cache, blocks, sources)


def copy_blocks(key_cache: Cache, value_cache: Cache, sources: Tensor, targets: Tensor) -> None:
    """Copy whole blocks: targets[i] becomes equal to sources[i] (int64 [num_copies], all targets distinct)."""
    for data in (data_of(key_cache), data_of(value_cache)):
        data[targets] = data[sources]


def gather(cache: Cache, block_tables: Tensor, lengths: Tensor, residuals: Tensor | None = None) -> Tensor:
    """The dense view [num_seqs, num_kv_heads, max(lengths), dim]; zeros behind the end of each sequence."""
    longest = int(lengths.max()) if lengths.numel() else 0
    shape = (len(lengths), cache.shape[1], longest, cache.shape[3])
    dense = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
    for seq, length in enumerate(lengths.tolist()):
        dense[seq, :, :length] = _context(cache, block_tables[seq], length, _residual_of(seq, residuals))
    return dense


def decode(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared_blocks: int = 0,
    residuals: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per sequence over its stored context: [num_seqs, num_heads, value_dim].

    `context_lengths` ([num_seqs] int32) counts the query's own token, which is stored already. A sequence of
    length 0 gets zeros. `shared_blocks` promises that the tables of all other sequences begin with that many of
    the same blocks, and that each goes on behind them: context_lengths[s] > shared_blocks * block_size. The forms
    for CPUs and GPUs then read those blocks once for all; the result is the same, and plain torch has no use for it.
    """
    starts = torch.arange(len(query), dtype=torch.int32, device=query.device)
    lengths = (context_lengths > 0).to(torch.int32)
    return prefill(
        query, key_cache, value_cache, block_tables, context_lengths, starts, lengths,
        scale=scale, window=window, softcap=softcap, sinks=sinks, residuals=residuals,
    )  # fmt: skip


def prefill(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    residuals: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged query tokens over paged context: [num_tokens, num_heads, value_dim].

    Sequence s owns the query rows query_starts[s] .. + query_lengths[s] (int32), which are the last
    query_lengths[s] of its context_lengths[s] stored tokens. A query at position p sees the keys at positions
    max(0, p - window + 1) .. p. Rows that no sequence owns become zeros. `softcap` c replaces a score x by
    c * tanh(x / c); `sinks` ([num_heads]) are logits that take part in the softmax and carry no value (as in
    GPT-OSS). Arithmetic is float32; the result has the dtype of `query`.
    """
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[3])
    for seq, (start, length, context) in enumerate(
        zip(query_starts.tolist(), query_lengths.tolist(), context_lengths.tolist(), strict=True)
    ):
        if length == 0:
            continue
        residual = _residual_of(seq, residuals)
        keys = _context(key_cache, block_tables[seq], context, residual)
        values = _context(value_cache, block_tables[seq], context, residual)
        rows = query[start : start + length]
        out[start : start + length] = _attend(rows, keys, values, scale, window, softcap, sinks).to(out.dtype)
    return out


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """query [length, num_heads, dim] over keys and values [num_kv_heads, context, dim], in float32."""
    group = query.shape[1] // keys.shape[0]
    keys = keys.float().repeat_interleave(group, dim=0)
    values = values.float().repeat_interleave(group, dim=0)
    scores = torch.einsum("qhd,hkd->hqk", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(len(query), keys.shape[1], window, query.device), float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, len(query), 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hqk,hkd->qhd", weights, values)


def visible(query_length: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """[query_length, context] bool: which keys the last `query_length` positions of a context may see."""
    query_positions = torch.arange(context - query_length, context, device=device)[:, None]
    key_positions = torch.arange(context, device=device)[None]
    causal = key_positions <= query_positions
    return causal if window is None else causal & (key_positions > query_positions - window)


def _residual_of(seq: int, residuals: Tensor | None) -> int:
    return -1 if residuals is None else int(residuals[seq])


def _context(cache: Cache, block_table: Tensor, length: int, residual: int) -> Tensor:
    """[num_kv_heads, length, dim] of one sequence."""
    blocks = block_table[: -(-length // cache.shape[2])].long()
    if not isinstance(cache, QuantizedCache):
        return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
    context = quantizing.read_blocks(cache, blocks).transpose(0, 1).flatten(1, 2)[:, :length]
    unfilled = length % cache.block_size
    if cache.residual is not None and residual >= 0 and unfilled:
        context[:, length - unfilled :] = cache.residual[residual, :unfilled].transpose(0, 1).float()
    return context
