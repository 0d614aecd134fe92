"""Attention and gathering over quantized caches on CPU against plain torch on the same bytes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import api, cpu_shared, numba_form, reference

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
Quantized, assert_equal_enough = cases["Quantized"], cases["assert_equal_enough"]
ENCODINGS, MIXTURES = cases["ENCODINGS"], cases["MIXTURES"]
QUERY_LENGTHS = (1, 0, 15, 4, 17, 1, 0, 33, 50)
# Even dims, as two codes of four bits share a byte. One shape meets all variants, all shapes meet one.
SHAPES = [name for name in cases["SHAPES"] if name != "odd 5"]
SHAPES_AND_VARIANTS = [("gqa 64", variant) for variant in cases["VARIANTS"]]
SHAPES_AND_VARIANTS += [(shape, "all") for shape in SHAPES if shape != "gqa 64"]
pytestmark = pytest.mark.usefixtures("two_threads_here_one_for_the_judge")


@pytest.fixture(autouse=True)
def never_plain_torch(monkeypatch):
    """The form must do all of this itself: it must not hand a call over to the judge."""
    judge = {name: getattr(reference, name) for name in ("decode", "prefill", "gather")}
    for name in judge:
        monkeypatch.setattr(numba_form.reference, name, None)
    return judge


def paged_of(mixture, shape="gqa 64", block_size=16, lengths=cases["LENGTHS"], dtype=torch.float32, **more):
    encodings = tuple(name and ENCODINGS[name] for name in MIXTURES[mixture])
    return Quantized(lengths, shape, block_size, dtype, encodings, **more)


def judged(judge, name, paged, variant, *between, **more):
    query = paged.query(int(between[1].sum()) if between else len(paged.lengths))
    arguments = (query, paged.keys, paged.values, paged.tables, paged.lengths, *between)
    options = {**paged.options(variant), "residuals": paged.residuals}
    result = getattr(api, name)(*arguments, **options, **more)
    with pytest.MonkeyPatch.context() as patch:
        for own, function in judge.items():
            patch.setattr(reference, own, function)
        expected = judge[name](*arguments, **options)
    assert_equal_enough(result, expected)
    assert result.isfinite().all()


def ragged(lengths):
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return lengths.cumsum(0).int() - lengths, lengths


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 256])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_decode_equals_plain_torch_for_every_encoding_and_block_size(mixture, block_size, never_plain_torch):
    for open_seqs in ((), (2, 3, 4, 8)):
        judged(never_plain_torch, "decode", paged_of(mixture, block_size=block_size, open_seqs=open_seqs), "plain")


@pytest.mark.parametrize(("shape", "variant"), SHAPES_AND_VARIANTS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_decode_equals_plain_torch_for_every_shape_and_variant(mixture, shape, variant, never_plain_torch):
    paged = paged_of(mixture, shape, open_seqs=(0, 2, 4, 5, 8), lengths=(1, 0, 15, 16, 33, 130, 40, 17, 64))
    judged(never_plain_torch, "decode", paged, variant)


@pytest.mark.parametrize(("shape", "variant"), SHAPES_AND_VARIANTS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_prefill_equals_plain_torch(mixture, shape, variant, never_plain_torch):
    paged = paged_of(mixture, shape, 8 if shape == "odd 20" else 16, open_seqs=(0, 2, 4, 8))
    judged(never_plain_torch, "prefill", paged, variant, *ragged(QUERY_LENGTHS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_residuals_and_queries_of_sixteen_bits(mixture, dtype, never_plain_torch):
    paged = paged_of(mixture, dtype=dtype, open_seqs=(2, 4, 8))
    judged(never_plain_torch, "decode", paged, "plain")
    judged(never_plain_torch, "prefill", paged, "plain", *ragged(QUERY_LENGTHS))


@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_blocks_that_are_shared_are_read_once_for_all(mixture, variant, never_plain_torch, monkeypatch):
    monkeypatch.setattr(cpu_shared, "sharing_pays", lambda num_seqs, kv_heads, group, shared, threads: shared > 0)
    lengths = (0, 81, 96, 97, 113, 0, 150, 82)
    for shape in ("gqa 64", "mqa 80"):
        paged = paged_of(mixture, shape, lengths=lengths, shared_blocks=5, open_seqs=(1, 3, 6))
        judged(never_plain_torch, "decode", paged, variant, shared_blocks=5)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_gathered_context_is_that_of_plain_torch_to_the_bit(mixture, block_size, never_plain_torch):
    for shape in ("gqa 64", "odd 20"):
        paged = paged_of(mixture, shape, block_size, open_seqs=(2, 3, 4, 8))
        for cache in (paged.keys, paged.values):
            result = api.gather(cache, paged.tables, paged.lengths, paged.residuals)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reference, "gather", never_plain_torch["gather"])
                expected = reference.gather(cache, paged.tables, paged.lengths, paged.residuals)
            assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3_static", "int8"])
def test_all_256_codes_are_read_as_torch_reads_them(name):
    cache = paged_of(name, "gqa 256", 16, (16,)).keys
    cache.codes[:] = torch.arange(256, dtype=torch.uint8)
    if cache.scales is None:
        cache.token_scales[:] = 0.3
    tables, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    scale = 1.0 if cache.scales is None else cache.scales[:, None, None]
    own = torch.tensor(0.3).bfloat16().float() if cache.scales is None else 1.0
    expected = torch.arange(256, dtype=torch.uint8).view(cache.encoding.dtype).float() * own * scale
    result = api.gather(cache, tables, lengths)[0]
    assert torch.equal(result.nan_to_num(7.0), expected.expand_as(result).nan_to_num(7.0))
    assert torch.equal(result.isnan(), expected.expand_as(result).isnan())


@pytest.mark.parametrize("mixture", MIXTURES)
def test_nan_in_what_is_seen_stays_visible(mixture, never_plain_torch):
    paged = paged_of(mixture, lengths=(40,))
    for cache in (paged.keys, paged.values):
        if isinstance(cache, torch.Tensor):
            cache[paged.tables[0, 1], 0, 3] = float("nan")
        elif cache.encoding.scales == "head":
            cache.codes[paged.tables[0, 1], 0, 3] = 0x7F
        elif cache.encoding.scales == "channel":
            cache.channel_steps[paged.tables[0, 1], 0] = float("nan")
        else:
            cache.token_scales[paged.tables[0, 1], 0, 3] = float("nan")
    query, options = paged.query(1), paged.options("plain")
    result = api.decode(query, paged.keys, paged.values, paged.tables, paged.lengths, **options)
    assert result[0, :3].isnan().any()
    assert result[0, 3:].isfinite().all()
