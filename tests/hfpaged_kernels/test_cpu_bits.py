"""The sixteen lanes: dtypes are read and rounded as torch does it, exp and tanh are as exact as they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hfpaged_kernels import cpu_math
from hfpaged_kernels.cpu_bits import BFLOAT16, FLOAT16, FLOAT32, LANES, convert, load, store
from hfpaged_kernels.cpu_math import exp, tanh
from numba import njit

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


@njit
def convert_all(source, source_kind, target, target_kind, count):
    convert(source, source_kind, target, target_kind, count)


@njit
def exp_all(source, target, count):
    for i in range(0, 4 * count, 4 * LANES):
        store(target + i, exp(load(source + i)))


@njit
def tanh_all(source, target, count):
    for i in range(0, 4 * count, 4 * LANES):
        store(target + i, tanh(load(source + i)))


def converted(source, dtype):
    target = torch.empty(source.shape, dtype=dtype)
    convert_all(source.data_ptr(), KINDS[source.dtype], target.data_ptr(), KINDS[dtype], source.numel())
    return target


def mapped(function, x):
    x = np.ascontiguousarray(x, dtype=np.float32)
    result = np.empty_like(x)
    function(x.ctypes.data, result.ctypes.data, x.size)
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_sixteen_bit_value_is_read_exactly(dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    assert torch.equal(converted(every, torch.float32).nan_to_num(7.0), every.float().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_is_rounded_to_the_bit_as_torch_rounds(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).to(torch.int32)
    ties = (torch.arange(2**16, dtype=torch.int64) * 2**16 + 2**15).to(torch.int32)
    half_ties = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float().view(torch.int32)
    values = torch.cat([bits, ties, half_ties + 2**12]).view(torch.float32)
    mine, theirs = converted(values, dtype), values.to(dtype)
    assert torch.equal(mine.isnan(), theirs.isnan())
    number = ~theirs.isnan()
    assert torch.equal(mine[number].view(torch.int16), theirs[number].view(torch.int16))


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 20, 33])
def test_lengths_that_are_no_multiple_of_the_lanes_write_nothing_behind_their_end(count):
    source, target = torch.randn(count), torch.full((64,), 7.0, dtype=torch.bfloat16)
    convert_all(source.data_ptr(), FLOAT32, target.data_ptr(), BFLOAT16, count)
    assert torch.equal(target[:count], source.to(torch.bfloat16))
    assert (target[count:] == 7).all()


def test_exp_is_within_three_parts_in_ten_million():
    x = np.linspace(-87, 88, 2**20).astype(np.float32)
    assert np.abs(mapped(exp_all, x) / np.exp(x.astype(np.float64)) - 1).max() < 3e-7


def test_exp_of_minus_infinity_and_of_very_negative_numbers_is_zero_and_nan_stays():
    x = np.array([-np.inf, -1e30, -100, -88, np.nan, 0] + [1.0] * 10)
    result = mapped(exp_all, x)
    assert result[:4].tolist() == [0, 0, 0, 0]
    assert np.isnan(result[4])
    assert result[5] == 1


def test_tanh_is_exact_for_small_and_for_large_numbers():
    small, large = np.geomspace(1e-6, 20, 2**16), np.array([0.0, 50, 1e6, np.inf] * 4)
    for x in (small, -small):
        x = x.astype(np.float32)
        assert np.abs(mapped(tanh_all, x) / np.tanh(x.astype(np.float64)) - 1).max() < 6e-7
    assert mapped(tanh_all, large).tolist() == [0, 1, 1, 1] * 4
    assert mapped(tanh_all, -large).tolist() == [0, -1, -1, -1] * 4


def test_minus_nothing_is_a_finite_maximum():
    assert np.isfinite(np.float32(cpu_math.NOTHING))
