"""Bytes that the CPU form writes into quantized caches are those of plain torch."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import api, numba_form, quantizing
from hfpaged_kernels.encoding import ENCODINGS, FP8_E4M3_STATIC, FP8_E5M2_STATIC, INT4, INT8
from hfpaged_kernels.quantized import QuantizedCache

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_TOKEN = [encoding for encoding in ENCODINGS if encoding.scales != "channel"]
HEADS = 3


@pytest.fixture(autouse=True)
def never_plain_torch(monkeypatch):
    for name in ("write_kv", "write_blocks"):
        monkeypatch.setattr(numba_form.reference, name, None)


def cache_of(encoding, dim=64, block_size=16, blocks=6, scales=None):
    generator = torch.Generator().manual_seed(1)
    shape = (blocks, HEADS, encoding.head_bytes(block_size, dim))
    data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if scales is None:
        scales = torch.tensor([0.01, 0.003, 2.0])
    return QuantizedCache(data, encoding, block_size, dim, torch.float32, scales if encoding.scales == "head" else None)


def normal(count, dim, seed=0):
    return torch.randn(count, HEADS, dim, generator=torch.Generator().manual_seed(seed))


def hostile(count, dim):
    """Rows (and channels of blocks) as they should not be, but are."""
    rows = normal(count, dim)
    rows[0] = 0
    rows[1, :, 3] = 1000
    rows[2] = 7.25
    rows[3] *= 1e-42
    rows[4] *= 1e38
    rows[5, :, ::2] = 0
    rows[6] = -3 * rows[6].abs()
    rows[7] = rows[7].round()
    rows[8] *= 2.0**-126
    rows[9] = rows[9].abs() + 1e4
    rows[10] = torch.linspace(-1, 1, dim)
    rows[:, 1, 5] = 0
    rows[:, 2, 6] *= 300
    return rows


def canonical(cache):
    """The bytes; a NaN is one and the same, whatever its sign and payload."""
    data = cache.data.clone()
    for name in ("token_scales", "channel_steps"):
        along = {"token_scales": "token", "channel_steps": "channel"}[name]
        if cache.encoding.scales == along:
            view = getattr(QuantizedCache(data, cache.encoding, cache.block_size, cache.dim, cache.dtype), name)
            view[view.isnan()] = float("nan")
    if cache.encoding.dtype.is_floating_point:
        codes = QuantizedCache(data, cache.encoding, cache.block_size, cache.dim, cache.dtype).codes
        codes[codes.view(cache.encoding.dtype).isnan()] = 0x7F
    return data


def assert_same_bytes(mine, theirs):
    assert torch.equal(canonical(mine), canonical(theirs))


def both_tokens(rows, encoding, slots=None, **more):
    mine, theirs = (cache_of(encoding, rows.shape[2], **more) for _ in range(2))
    slots = torch.arange(len(rows)) if slots is None else slots
    api.write_kv(rows, rows, mine, mine, slots)
    quantizing.write_tokens(rows, theirs, slots)
    return mine, theirs


def both_blocks(rows, encoding, block_size=16, **more):
    mine, theirs = (cache_of(encoding, rows.shape[2], block_size, **more) for _ in range(2))
    blocks = torch.tensor([4, 1, 5])
    sources = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
    sources = sources[: 3 * block_size].view(3, block_size)
    api.write_blocks(rows, mine, blocks, sources)
    quantizing.write_blocks(rows, theirs, blocks, sources)
    return mine, theirs


def ids(encoding):
    return encoding.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 20, 2])
@pytest.mark.parametrize("encoding", BY_TOKEN, ids=ids)
def test_tokens_are_those_of_plain_torch_to_the_bit(encoding, dim, dtype):
    slots = torch.tensor([3, -1, 16, 90, 17, -1, 0, 40])
    assert_same_bytes(*both_tokens(normal(8, dim).to(dtype), encoding, slots))


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("dim", [64, 80, 96, 20])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=ids)
def test_blocks_are_those_of_plain_torch_to_the_bit(encoding, dim, block_size):
    assert_same_bytes(*both_blocks(normal(100, dim), encoding, block_size))
    assert_same_bytes(*both_blocks(hostile(100, dim), encoding, block_size))


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("encoding", BY_TOKEN, ids=ids)
def test_outliers_zeros_and_subnormal_numbers_too(encoding, dim):
    assert_same_bytes(*both_tokens(hostile(40, dim), encoding))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=ids)
def test_what_is_no_number_gives_the_bytes_of_plain_torch(encoding, bad):
    rows = hostile(48, 64)
    rows[20, 0, 0], rows[21, 1, 33], rows[22, 2] = bad, bad, bad
    rows[23, 0, 0], rows[23, 0, 1] = bad, -bad
    assert_same_bytes(*both_blocks(rows, encoding))
    if encoding.scales != "channel":
        assert_same_bytes(*both_tokens(rows, encoding))


@pytest.mark.parametrize("encoding", [FP8_E4M3_STATIC, FP8_E5M2_STATIC], ids=ids)
def test_every_sixteen_bit_number_and_those_in_the_middle_become_the_codes_that_torch_makes(encoding):
    near = torch.arange(2**16, dtype=torch.int32)
    numbers = torch.cat([(near << 16) + add for add in (0, 1, 0x7FFF, 0x8000, -1)]).view(torch.float32)
    halves = near.to(torch.uint16).view(torch.float16).float()
    numbers = torch.cat([numbers, halves, halves * 2.0**-9]).view(-1, 1, 64).repeat(1, HEADS, 1)
    blocks = -(-len(numbers) // 16)
    assert_same_bytes(*both_tokens(numbers, encoding, blocks=blocks, scales=torch.tensor([1.0, 0.37, 2.0**20])))


def test_views_and_odd_strides_are_read_where_they_lie():
    states = torch.randn(1, HEADS, 12, 64)
    rows = states[0].transpose(0, 1)
    assert_same_bytes(*both_tokens(rows, INT8))
    wide = torch.randn(12, HEADS, 128)[..., ::2]
    assert_same_bytes(*both_tokens(wide, INT4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residuals_are_written_through_a_view_that_has_strided_rows(dtype):
    residual = torch.zeros(4, 16, HEADS, 64, dtype=dtype)
    rows, slots = normal(5, 64), torch.tensor([0, 17, -1, 63, 5])
    api.write_kv(rows, 2 * rows, residual.transpose(1, 2), residual.clone().transpose(1, 2), slots)
    flat = residual.flatten(0, 1)
    assert torch.equal(flat[slots[slots >= 0]], rows[slots >= 0].to(dtype))
    assert int((flat != 0).any(-1).any(-1).sum()) == 4


@pytest.mark.parametrize("encoding", ENCODINGS, ids=ids)
def test_copied_blocks_take_their_scales_along(encoding):
    mine = cache_of(encoding)
    before = mine.data.clone()
    api.copy_blocks(mine, mine, torch.tensor([0, 3]), torch.tensor([5, 1]))
    assert torch.equal(mine.data[[5, 1]], before[[0, 3]])
    assert torch.equal(mine.data[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
