"""Writing, copying and gathering blocks on CPU against plain torch: bit for bit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import numba_form, reference

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
Paged = cases["Paged"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def caches(dtype, value_dim=64, block_size=16):
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(9, 3, block_size, 64, generator=generator).to(dtype)
    values = torch.randn(9, 3, block_size, value_dim, generator=generator).to(dtype)
    return keys, values


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("value_dim", [64, 20, 5])
def test_written_tokens_are_those_of_plain_torch_to_the_bit(source, target, value_dim):
    key, value = torch.randn(7, 3, 64).to(source), torch.randn(7, 3, value_dim).to(source)
    slots = torch.tensor([3, -1, 16, 143, 17, -1, 0])
    mine, theirs = caches(target, value_dim), caches(target, value_dim)
    numba_form.write_kv(key, value, *mine, slots)
    reference.write_kv(key, value, *theirs, slots)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


def test_tokens_of_a_view_as_attention_layers_make_them_are_written_without_a_copy():
    states = torch.randn(1, 3, 5, 64)
    key = value = states[0].transpose(0, 1)
    mine, theirs = caches(torch.float32), caches(torch.float32)
    slots = torch.tensor([1, 2, 3, 40, 41])
    numba_form.write_kv(key, value, *mine, slots)
    reference.write_kv(key, value, *theirs, slots)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


def test_a_tensor_that_requires_grad_is_written_too():
    key = torch.randn(1, 3, 64, requires_grad=True)
    keys, values = caches(torch.float32)
    with torch.no_grad():
        numba_form.write_kv(key, key, keys, values, torch.tensor([5]))
    assert torch.equal(keys[0, :, 5], key[0])


@pytest.mark.parametrize(
    ("sources", "targets"), [([0, 3], [5, 8]), ([2, 2], [4, 1]), ([0, 1], [1, 2]), ([4, 5], [5, 4]), ([], [])]
)
def test_copies_are_made_as_if_all_were_read_before_any_is_written(sources, targets):
    mine, theirs = caches(torch.bfloat16), caches(torch.bfloat16)
    pairs = torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    numba_form.copy_blocks(*mine, *pairs)
    reference.copy_blocks(*theirs, *pairs)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", cases["BLOCK_SIZES"])
def test_gathered_context_is_dense_and_zero_behind_its_end(dtype, block_size):
    paged = Paged(cases["LENGTHS"], "odd 20", block_size, dtype)
    result = numba_form.gather(paged.keys, paged.tables, paged.lengths)
    assert torch.equal(result, reference.gather(paged.keys, paged.tables, paged.lengths))


def test_gathering_nothing_gives_nothing():
    paged = Paged((0, 0), "gqa 64", 16, torch.float32)
    assert numba_form.gather(paged.keys, paged.tables, paged.lengths).shape == (2, 3, 0, 64)
