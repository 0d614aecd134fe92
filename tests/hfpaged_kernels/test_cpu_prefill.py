"""Ragged prefill over paged context on CPU against plain torch."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import cpu_dense, cpu_threads, numba_form, reference

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
Paged, assert_equal_enough = cases["Paged"], cases["assert_equal_enough"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of cases["LENGTHS"]: everything new, one new token, none, and a few behind a past.
QUERY_LENGTHS = (1, 0, 15, 4, 17, 1, 0, 33, 50)
pytestmark = pytest.mark.usefixtures("two_threads_here_one_for_the_judge")


def both(paged, variant, query_lengths, rows_before=0, rows_between=0):
    lengths = torch.tensor(query_lengths, dtype=torch.int32)
    starts = (lengths + rows_between).cumsum(0).int() - lengths - rows_between + rows_before
    query = paged.query(int(starts[-1] + lengths[-1]) + rows_between)
    options = paged.options(variant)
    arguments = (query, paged.keys, paged.values, paged.tables, paged.lengths, starts, lengths)
    return numba_form.prefill(*arguments, **options), reference.prefill(*arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", cases["VARIANTS"])
@pytest.mark.parametrize("shape", cases["SHAPES"])
def test_prefill_equals_plain_torch_for_every_shape_and_variant(shape, variant, dtype):
    for block_size in cases["BLOCK_SIZES"] if dtype is torch.float32 else (8, 16):
        paged = Paged(cases["LENGTHS"], shape, block_size, dtype)
        assert_equal_enough(*both(paged, variant, QUERY_LENGTHS))


def test_rows_that_no_sequence_owns_become_zeros():
    paged = Paged((40, 7), "gqa 64", 16, torch.float32)
    result, expected = both(paged, "plain", (5, 7), rows_before=2, rows_between=3)
    assert_equal_enough(result, expected)
    assert (result[:2] == 0).all()
    assert (result[7:10] == 0).all()
    assert (result[17:] == 0).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_tiles_are_cut_anywhere_and_merged_right(variant, threads, monkeypatch):
    monkeypatch.setattr(cpu_threads, "_threads", lambda: threads)
    paged = Paged((900, 130, 20), "gqa 64", 16, torch.float32)
    assert_equal_enough(*both(paged, variant, (3, 130, 20)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("past", [0, 1, 500])
def test_long_runs_of_new_tokens_are_right(past, dtype):
    paged = Paged((700 + past, 40), "gqa 64", 16, dtype)
    assert_equal_enough(*both(paged, "plain", (700, 3)))


@pytest.mark.parametrize("past", [0, 1, 500])
def test_long_runs_are_right_by_way_of_the_dense_attention_of_torch(past, monkeypatch):
    monkeypatch.setattr(cpu_dense, "_has_matrix_unit", lambda: True)
    paged = Paged((100 + past, 0, 40), "gqa 64", 16, torch.bfloat16)
    assert_equal_enough(*both(paged, "plain", (100, 0, 3), rows_before=2))


def test_windows_softcaps_sinks_and_short_runs_never_go_the_dense_way(monkeypatch):
    monkeypatch.setattr(cpu_dense, "_has_matrix_unit", lambda: True)
    query, cache = torch.zeros(64, 4, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    assert cpu_dense.dense_is_faster(query, cache, cache, 1, plain=True)
    assert not cpu_dense.dense_is_faster(query, cache, cache, 1, plain=False)
    assert not cpu_dense.dense_is_faster(query, cache, cache, 4, plain=True)
    assert not cpu_dense.dense_is_faster(query.float(), cache, cache, 1, plain=True)


def test_no_query_token_at_all_gives_an_empty_result():
    paged = Paged((20,), "gqa 64", 16, torch.float32)
    result, expected = both(paged, "plain", (0,))
    assert result.shape == expected.shape
