"""What the Triton form refuses before it launches anything, and how it cuts the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hfpaged_kernels import triton_form, triton_launch


def _decode(**changes: Any) -> None:
    given = {
        "query": torch.zeros(1, 4, 64),
        "key_cache": torch.zeros(2, 2, 16, 64),
        "value_cache": torch.zeros(2, 2, 16, 64),
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "context_lengths": torch.ones(1, dtype=torch.int32),
        "scale": 1.0,
    }
    triton_form.decode(**given | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(1, 4, 64, dtype=torch.float16)}, "need one dtype"),
        ({"query": torch.zeros(1, 4, 32)}, "head dim 32"),
        ({"query": torch.zeros(1, 3, 64)}, "no multiple of 2 KV heads"),
        ({"key_cache": torch.zeros(2, 2, 24, 64)}, "block_size=24 is not a power of two"),
        ({"key_cache": torch.zeros(2, 2, 64, 16).mT}, "must be contiguous"),
        ({"value_cache": torch.zeros(2, 2, 16, 64, dtype=torch.float64)}, "float64"),
        ({"window": 0}, "window=0"),
    ],
)
def test_what_cannot_run_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _decode(**changes)


@pytest.mark.parametrize(
    ("programs", "longest", "processors", "splits"),
    [
        (8, 100, 132, 1),  # too short to be worth a merge
        (8, 4096, 132, 32),  # parts of 128 positions
        (8, 131072, 132, 33),  # two programs for each processor
        (1, 131072, 132, 64),  # the most that a merge holds
        (1024, 131072, 132, 1),  # enough programs without a split
        (1, 0, 132, 1),
    ],
)
def test_splits_fill_the_device_but_stay_long(programs: int, longest: int, processors: int, splits: int) -> None:
    assert triton_launch.num_splits(programs, longest, processors) == splits


@pytest.mark.parametrize(
    ("num_seqs", "shared_blocks", "window", "length"),
    [
        (32, 64, None, 1024),
        (32, 64, 4096, 0),  # of which each sequence would see another part
        (2, 64, None, 0),  # too little to read for a launch more
        (1, 4096, None, 0),  # nobody to share with
        (32, 0, None, 0),
    ],
)
def test_a_prefix_is_shared_where_that_saves_much_reading(
    num_seqs: int, shared_blocks: int, window: int | None, length: int
) -> None:
    query, cache = (torch.zeros(size, dtype=torch.bfloat16) for size in ((num_seqs, 32, 128), (1, 8, 16, 128)))
    prefix = triton_launch.shared_prefix(query, cache, cache, shared_blocks, window, 132)
    assert prefix.length == length
    assert prefix.splits <= triton_launch.MAX_SPLITS // 2
