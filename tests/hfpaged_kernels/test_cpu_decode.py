"""Paged decode on CPU against plain torch."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import cpu_threads, numba_form, reference

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
Paged, assert_equal_enough = cases["Paged"], cases["assert_equal_enough"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("two_threads_here_one_for_the_judge")


def both(paged, variant, query):
    options = paged.options(variant)
    arguments = (query, paged.keys, paged.values, paged.tables, paged.lengths)
    return numba_form.decode(*arguments, **options), reference.decode(*arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", cases["VARIANTS"])
@pytest.mark.parametrize("shape", cases["SHAPES"])
def test_decode_equals_plain_torch_for_every_shape_and_variant(shape, variant, dtype):
    for block_size in cases["BLOCK_SIZES"] if dtype is torch.float32 else (8, 16):
        paged = Paged(cases["LENGTHS"], shape, block_size, dtype)
        assert_equal_enough(*both(paged, variant, paged.query(len(paged.lengths))))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("variant", ["plain", "sinks"])
def test_one_long_sequence_is_split_and_merged_right(variant, threads, monkeypatch):
    monkeypatch.setattr(cpu_threads, "_threads", lambda: threads)
    paged = Paged((2111,), "gqa 64", 16, torch.float32)
    assert_equal_enough(*both(paged, variant, paged.query(1)))


@pytest.mark.parametrize("threads", [2, 3, 7, 64])
def test_many_more_shares_than_threads_cut_sequences_anywhere(threads, monkeypatch):
    monkeypatch.setattr(cpu_threads, "_threads", lambda: threads)
    paged = Paged((700, 0, 3, 1500, 64, 300), "mqa 80", 16, torch.float32)
    assert_equal_enough(*both(paged, "all", paged.query(6)))
    assert_equal_enough(*both(paged, "sinks", paged.query(6)))


@pytest.mark.parametrize("window", [1, 16, 2000])
def test_blocks_out_of_the_window_are_not_read(window):
    paged = Paged((200, 33), "gqa 64", 16, torch.float32)
    if window == 1:
        paged.tables[0, :12] = -7
        paged.tables[1, :2] = 2**31 - 1
    options = {**paged.options("plain"), "window": window}
    query = paged.query(2)
    result = numba_form.decode(query, paged.keys, paged.values, paged.tables, paged.lengths, **options)
    assert result.isfinite().all()


def test_a_sequence_of_length_zero_gets_zeros():
    paged = Paged((0, 5), "gqa 64", 16, torch.float32)
    result, _ = both(paged, "sinks", paged.query(2))
    assert (result[0] == 0).all()
    assert result[1].isfinite().all()


def test_scores_far_apart_overflow_nothing():
    paged = Paged((100,), "gqa 64", 16, torch.float32)
    assert_equal_enough(*both(paged, "plain", 1000 * paged.query(1)))


def test_nan_in_a_key_that_is_seen_stays_visible_as_in_torch():
    paged = Paged((20,), "gqa 64", 16, torch.float32)
    paged.keys[paged.tables[0, 0], 0, 3] = float("nan")
    result, expected = both(paged, "plain", paged.query(1))
    assert torch.equal(result.isnan(), expected.isnan())
    assert result.isnan().any()


def test_views_inference_tensors_and_other_integer_types_are_taken():
    paged = Paged((20, 33), "gqa 64", 16, torch.float32)
    query = paged.query(2)
    options = paged.options("plain")
    expected = reference.decode(query, paged.keys, paged.values, paged.tables, paged.lengths, **options)
    with torch.inference_mode():
        view = query.transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.cat([paged.tables, paged.tables], dim=1)[:, : paged.tables.shape[1]]
        result = numba_form.decode(view, paged.keys, paged.values, wide, paged.lengths.long(), **options)
        assert_equal_enough(result, expected)
        every_other = torch.stack([query, query], dim=-1).flatten(-2)[..., ::2]
        result = numba_form.decode(every_other, paged.keys, paged.values, paged.tables.long(), paged.lengths, **options)
        assert_equal_enough(result, expected)


def test_a_query_of_another_dtype_than_the_cache_gives_its_own_dtype():
    paged = Paged((20, 33), "gqa 64", 16, torch.bfloat16)
    result, expected = both(paged, "plain", paged.query(2).float())
    assert_equal_enough(result, expected)


def test_caches_that_cannot_be_addressed_go_to_plain_torch():
    paged = Paged((20,), "gqa 64", 16, torch.float32)
    keys, values = paged.keys.double(), paged.values.double()
    options = paged.options("plain")
    result = numba_form.decode(paged.query(1), keys, values, paged.tables, paged.lengths, **options)
    assert result.shape == (1, 9, 64)


def test_layers_of_one_large_cache_are_read_through_their_strides():
    paged = Paged((20, 33), "gqa 64", 16, torch.float32)
    both_caches = torch.stack([paged.keys, paged.values], dim=1)
    query, options = paged.query(2), paged.options("plain")
    arguments = (both_caches[:, 0], both_caches[:, 1], paged.tables, paged.lengths)
    assert_equal_enough(numba_form.decode(query, *arguments, **options), reference.decode(query, *arguments, **options))
