"""What the Triton form refuses before it launches anything, and how it cuts the context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hfpaged_kernels import encoding as encodings
from hfpaged_kernels import triton_form, triton_launch, triton_parts
from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import QuantizedCache


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


def _quantized(encoding: Encoding, dim: int = 64, block_size: int = 16, **more: Any) -> QuantizedCache:
    data = torch.zeros(2, 2, encoding.head_bytes(block_size, dim), dtype=torch.uint8)
    return QuantizedCache(data, encoding, block_size, dim, torch.float32, **more)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (_quantized(encodings.INT8, block_size=24), "block_size=24 is not a power of two"),
        (_quantized(encodings.INT4, dim=63), "head dim 63 in 4 bits"),
        (_quantized(encodings.FP8_E4M3_STATIC), "a scale for each of the 2 heads"),
        (replace(_quantized(encodings.INT8), dtype=torch.float16), "need one dtype"),
        (replace(_quantized(encodings.INT8), data=torch.zeros(2, 2, 1057, dtype=torch.uint8)), "even addresses"),
        (_quantized(encodings.INT8, residual=torch.zeros(1, 2, 16, 64).transpose(1, 2)), "must be contiguous"),
        (_quantized(encodings.INT8, residual=torch.zeros(1, 16, 2, 64).half()), "this one is torch.float16"),
    ],
)
def test_a_quantized_cache_that_cannot_be_read_is_refused_in_words(cache: QuantizedCache, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _decode(value_cache=cache)


def test_tokens_are_not_written_one_by_one_where_scales_are_those_of_blocks() -> None:
    cache, row = _quantized(encodings.INT4_CHANNEL), torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match="write_blocks"):
        triton_form.write_kv(row, row, cache, cache, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("encoding", "block_size", "dim", "words"),
    [
        (encodings.INT8, 16, 64, torch.int64),  # 1,024 bytes of codes and 32 of scales
        (encodings.INT8, 2, 64, torch.int32),
        (encodings.INT8, 1, 64, torch.int16),
    ],
)
def test_blocks_are_copied_by_the_widest_word_that_fits(
    encoding: Encoding, block_size: int, dim: int, words: torch.dtype
) -> None:
    cache = _quantized(encoding, dim, block_size)
    assert triton_parts.as_words(cache).dtype == words
    assert triton_parts.token_bytes(cache) == cache.data.shape[2] / block_size


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


class _Launches:
    """Stands for a kernel: what it would be launched with, without the tensors, whose contents a graph reads anew."""

    def __init__(self, name: str, launches: list[Any]) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = [*enumerate(args), *sorted(kwargs.items())]
            fixed = [
                (key, (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value)
                for key, value in given
            ]
            self._launches.append((self._name, grid, fixed))

        return launch


@pytest.mark.parametrize("window", [None, 9])
def test_what_a_decode_is_launched_with_depends_on_shapes_and_not_on_what_tensors_hold(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded launch keeps its numbers: those that differ between two steps of one key would be wrong in silence."""
    found: list[list[Any]] = []
    monkeypatch.setattr(triton_launch, "num_processors", lambda device: 132)
    for lengths in ([1, 0, 0, 0], [4000, 17, 4096, 1], [5, 0, 4096, 0]):
        launches: list[Any] = []
        for name in ("decode_kernel", "merge_kernel", "write_kv_kernel", "shared_kernel"):
            monkeypatch.setattr(triton_form, name, _Launches(name, launches))
        caches = torch.zeros(2, 8, 2, 16, 64)
        tables = torch.randint(8, (4, 256), dtype=torch.int32)
        contexts = torch.tensor(lengths, dtype=torch.int32)
        triton_form.write_kv(torch.zeros(4, 2, 64), torch.zeros(4, 2, 64), *caches, torch.tensor(lengths) - 1)
        triton_form.decode(torch.zeros(4, 8, 64), *caches, tables, contexts, scale=0.1, window=window)
        found.append(launches)
    assert found[0] == found[1] == found[2]
    names = [name for name, _, _ in found[0]]
    assert names == ["write_kv_kernel", "decode_kernel", *(["merge_kernel"] if window is None else [])]
