"""Decode on CPU over blocks that sequences share, read once for all of them, against plain torch."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import api, cpu_decode, cpu_shared, cpu_threads, numba_form, reference

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
Paged, assert_equal_enough = cases["Paged"], cases["assert_equal_enough"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("two_threads_here_one_for_the_judge")


@pytest.fixture
def always_sharing(monkeypatch):
    """However little it pays."""
    monkeypatch.setattr(cpu_shared, "sharing_pays", lambda num_seqs, kv_heads, group, shared, threads: shared > 0)


def lengths_behind(shared, *own):
    """Context lengths of sequences with so many tokens of their own behind `shared` positions; None is an empty one."""
    return tuple(0 if tokens is None else shared + tokens for tokens in own)


def all_three(paged, variant, shared_blocks):
    """Decode with the shared blocks read once, decode as if nobody knew of them, and plain torch."""
    options = paged.options(variant)
    arguments = (paged.query(len(paged.lengths)), paged.keys, paged.values, paged.tables, paged.lengths)
    with_sharing = numba_form.decode(*arguments, **options, shared_blocks=shared_blocks)
    return with_sharing, numba_form.decode(*arguments, **options), reference.decode(*arguments, **options)


def assert_all_equal(results):
    with_sharing, without, expected = results
    assert_equal_enough(with_sharing, without)
    assert_equal_enough(with_sharing, expected)


@pytest.mark.usefixtures("always_sharing")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", cases["VARIANTS"])
@pytest.mark.parametrize("shape", cases["SHAPES"])
def test_sharing_changes_nothing_for_every_shape_and_variant(shape, variant, dtype):
    for block_size, shared_blocks in ((1, 33), (8, 5), (16, 4)) if dtype is torch.float32 else ((8, 5), (16, 4)):
        shared = block_size * shared_blocks
        lengths = lengths_behind(shared, None, 1, block_size, block_size + 1, 33, None, 70, 2)
        paged = Paged(lengths, shape, block_size, dtype, shared_blocks=shared_blocks)
        assert_all_equal(all_three(paged, variant, shared_blocks))


@pytest.mark.usefixtures("always_sharing")
@pytest.mark.parametrize("own", [(15, 16, 17), (1,), (None, 1), (3,) * 6, (5,) * 11, (50,) * 22])
@pytest.mark.parametrize("shared_blocks", [1, 2, 3, 7])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_rows_and_threads_is_cut_and_merged_right(threads, shared_blocks, own, monkeypatch):
    monkeypatch.setattr(cpu_threads, "_threads", lambda: threads)
    paged = Paged(lengths_behind(16 * shared_blocks, *own), "gqa 64", 16, torch.float32, shared_blocks=shared_blocks)
    assert_all_equal(all_three(paged, "sinks", shared_blocks))
    assert_all_equal(all_three(paged, "softcap", shared_blocks))


@pytest.mark.usefixtures("always_sharing")
def test_only_some_of_the_common_blocks_may_be_announced():
    paged = Paged(lengths_behind(96, 5, 16, 40), "gqa 64", 16, torch.float32, shared_blocks=6)
    for announced in (0, 1, 4, 6):
        assert_all_equal(all_three(paged, "plain", announced))


@pytest.mark.usefixtures("always_sharing")
def test_the_shared_part_is_read_from_the_first_table_alone():
    paged = Paged(lengths_behind(64, None, 9, 20), "gqa 64", 16, torch.float32, shared_blocks=4)
    query, options = paged.query(3), paged.options("plain")
    expected = reference.decode(query, paged.keys, paged.values, paged.tables, paged.lengths, **options)
    paged.tables[2, :4] = -7
    arguments = (query, paged.keys, paged.values, paged.tables, paged.lengths)
    assert_equal_enough(numba_form.decode(*arguments, **options, shared_blocks=4), expected)


@pytest.mark.usefixtures("always_sharing")
def test_a_promise_that_a_sequence_does_not_keep_is_not_relied_on():
    paged = Paged((64, 80, 70), "gqa 64", 16, torch.float32, shared_blocks=4)
    assert_all_equal(all_three(paged, "plain", 4))


@pytest.mark.usefixtures("always_sharing")
def test_no_sequence_with_a_token_gives_zeros():
    paged = Paged((0, 0), "gqa 64", 16, torch.float32)
    with_sharing, _, _ = all_three(paged, "sinks", 1)
    assert (with_sharing == 0).all()


@pytest.mark.usefixtures("always_sharing")
def test_scores_far_apart_and_nan_behave_as_in_plain_torch():
    paged = Paged(lengths_behind(64, 9, 20), "gqa 64", 16, torch.float32, shared_blocks=4)
    arguments = (1000 * paged.query(2), paged.keys, paged.values, paged.tables, paged.lengths)
    options = paged.options("plain")
    result = numba_form.decode(*arguments, **options, shared_blocks=4)
    assert_equal_enough(result, reference.decode(*arguments, **options))
    paged.keys[paged.tables[0, 0], 0, 3] = float("nan")
    result = numba_form.decode(*arguments, **options, shared_blocks=4)
    assert torch.equal(result.isnan(), reference.decode(*arguments, **options).isnan())
    assert result.isnan().any()


@pytest.fixture
def prefixes(monkeypatch):
    """The number of shared positions that every call of the compiled decode was told of."""
    seen = []

    def run(kernel, shared, *rest):
        if kernel is cpu_decode.decode:
            seen.append(shared)

    monkeypatch.setattr(cpu_threads, "run", run)
    return seen


def test_windows_and_few_rows_are_decoded_as_if_nothing_were_shared(prefixes):
    many = Paged(lengths_behind(512, *(5,) * 8), "gqa 64", 16, torch.float32, shared_blocks=32)
    few = Paged(lengths_behind(512, 5, 5), "gqa 64", 16, torch.float32, shared_blocks=32)
    for paged, window in ((many, None), (many, 1000), (few, None)):
        arguments = (paged.query(len(paged.lengths)), paged.keys, paged.values, paged.tables, paged.lengths)
        api.decode(*arguments, scale=0.1, window=window, shared_blocks=32)
    assert prefixes == [512, 0, 0]


@pytest.mark.parametrize(
    ("num_seqs", "group", "shared", "threads", "pays"),
    [
        (32, 3, 992, 1, True),
        (32, 3, 992, 16, True),
        (4, 3, 512, 1, True),
        (4, 3, 512, 2, False),  # a second waking of the threads costs more than is saved
        (8, 3, 512, 2, True),
        (4, 3, 128, 1, False),  # so does turning rows into lanes and back
        (2, 3, 100_000, 1, False),  # ten of sixteen lanes idle
        (1, 71, 100_000, 1, False),
        (8, 1, 256, 1, True),
        (32, 8, 16, 1, False),
        (32, 8, 0, 1, False),
    ],
)
def test_sharing_pays_for_many_rows_and_long_prefixes(num_seqs, group, shared, threads, pays):
    assert cpu_shared.sharing_pays(num_seqs, 3, group, shared, threads) is pays
