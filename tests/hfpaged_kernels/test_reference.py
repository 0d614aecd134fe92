"""The judge judged: plain torch's paged attention against scaled_dot_product_attention on dense tensors."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import reference
from torch.nn.functional import scaled_dot_product_attention

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
Paged = cases["Paged"]


def dense_attention(query, keys, values, mask, scale):
    """query [tokens, heads, dim] over one sequence's keys and values [kv_heads, context, dim]."""
    group = query.shape[1] // keys.shape[0]
    keys, values = (x.repeat_interleave(group, dim=0)[None] for x in (keys, values))
    result = scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=scale)
    return result[0].transpose(0, 1)


def context(cache, table, length):
    rows = [cache[int(table[i // cache.shape[2]]), :, i % cache.shape[2]] for i in range(length)]
    return torch.stack(rows, dim=1)


def mask_of(query_length, length, window):
    """Written out key by key, unlike the reference."""
    mask = torch.zeros(query_length, length, dtype=torch.bool)
    for row in range(query_length):
        position = length - query_length + row
        first = 0 if window is None else max(0, position - window + 1)
        mask[row, first : position + 1] = True
    return mask


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("shape", cases["SHAPES"])
def test_prefill_equals_dense_attention(shape, window):
    paged = Paged((1, 16, 40, 33), shape, 16, torch.float32)
    lengths = torch.tensor([1, 16, 5, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 17, 22], dtype=torch.int32)
    query, scale = paged.query(23), 0.3
    result = reference.prefill(
        query, paged.keys, paged.values, paged.tables, paged.lengths, starts, lengths, scale=scale, window=window
    )
    for seq, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        total = int(paged.lengths[seq])
        if length:
            expected = dense_attention(
                query[start : start + length], context(paged.keys, paged.tables[seq], total),
                context(paged.values, paged.tables[seq], total), mask_of(length, total, window), scale,
            )  # fmt: skip
            torch.testing.assert_close(result[start : start + length], expected, atol=1e-5, rtol=1e-5)
    assert (result[22] == 0).all()


@pytest.mark.parametrize("shape", cases["SHAPES"])
def test_decode_equals_dense_attention(shape):
    paged = Paged((1, 0, 16, 40), shape, 16, torch.float32)
    query = paged.query(4)
    result = reference.decode(query, paged.keys, paged.values, paged.tables, paged.lengths, scale=0.3)
    assert (result[1] == 0).all()
    for seq in (0, 2, 3):
        total = int(paged.lengths[seq])
        keys, values = (context(c, paged.tables[seq], total) for c in (paged.keys, paged.values))
        expected = dense_attention(query[seq : seq + 1], keys, values, None, 0.3)
        torch.testing.assert_close(result[seq : seq + 1], expected, atol=1e-5, rtol=1e-5)


def test_a_sink_is_a_key_with_that_score_and_the_value_zero():
    paged = Paged((9,), "mha 64", 16, torch.float32)
    query, sinks = paged.query(1), torch.randn(4)
    result = reference.decode(query, paged.keys, paged.values, paged.tables, paged.lengths, scale=0.3, sinks=sinks)
    keys, values = (context(c, paged.tables[0], 9) for c in (paged.keys, paged.values))
    scores = torch.einsum("hd,hkd->hk", query[0], keys) * 0.3
    weights = torch.cat([scores, sinks[:, None]], dim=1).exp()
    expected = torch.einsum("hk,hkd->hd", weights[:, :-1], values) / weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(result[0], expected, atol=1e-5, rtol=1e-5)


def test_softcap_bends_scores_before_the_softmax():
    paged = Paged((9,), "mha 64", 16, torch.float32)
    query = 5 * paged.query(1)
    result = reference.decode(query, paged.keys, paged.values, paged.tables, paged.lengths, scale=0.3, softcap=2.0)
    keys, values = (context(c, paged.tables[0], 9) for c in (paged.keys, paged.values))
    scores = 2.0 * torch.tanh(torch.einsum("hd,hkd->hk", query[0], keys) * 0.3 / 2.0)
    expected = torch.einsum("hk,hkd->hd", scores.softmax(dim=-1), values)
    torch.testing.assert_close(result[0], expected, atol=1e-5, rtol=1e-5)
