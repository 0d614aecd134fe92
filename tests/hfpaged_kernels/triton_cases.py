"""The cases that the Triton kernels must pass in the interpreter and on a device, and how one is judged.

Whatever a kernel must not read is poisoned: slots without a token hold NaN, table entries behind the end of a
sequence or wholly before its window hold ids of no block. The plain torch form, which multiplies hidden keys
by zero, gets clean copies of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hfpaged_kernels import reference, triton_form, triton_launch
from torch import Tensor

# Absolute and relative. In half precision the weights of the softmax are rounded before they meet the values
# (2**-11 for float16, 2**-8 for bfloat16), and the output is rounded once more.
BOUNDS = {torch.float32: (3e-6, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
GARBAGE_IDS = (-1, 2**31 - 1, -(2**31), 1_000_003)


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    contexts: tuple[int, ...] = (15, 16, 17, 0, 33, 100)
    query_lengths: tuple[int, ...] = (15, 1, 5, 0, 33, 19)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int = 1
    # So many blocks at the beginning of the tables of all sequences with tokens are the same.
    shared_blocks: int = 0


HALVES = (torch.float16, torch.bfloat16)
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
EVERYTHING: dict[str, Any] = {"window": 21, "softcap": 4.0, "sinks": True}

CASES = (
    *(Case(f"float32 with head dims {k} and {v}", key_dim=k, value_dim=v) for k, v in DIMS),
    *(Case(f"{t} with head dims {k} and {v}", t, key_dim=k, value_dim=v) for t in HALVES for k, v in DIMS),
    Case("a head dim below 16", key_dim=8, value_dim=8),
    Case("a query head for each KV head", heads=3, kv_heads=3),
    Case("groups of 7 query heads", heads=14, kv_heads=2),
    Case("one KV head for 71 query heads, more than a program takes", heads=71, kv_heads=1),
    *(Case(f"blocks of {size} slots", block_size=size) for size in (1, 8, 32, 256)),
    *(Case(f"a window of {size}", window=size) for size in (1, 16, 17, 40, 1000)),
    Case("a soft cap", softcap=2.0),
    Case("a soft cap far below the scores", softcap=0.01),
    Case("sinks", sinks=True),
    *(Case(f"{n} splits", splits=n, contexts=(15, 16, 17, 0, 300, 129)) for n in (2, 3, 8)),
    Case("window, soft cap and sinks", **EVERYTHING),
    *(Case(f"window, soft cap and sinks in {t} and 5 splits", t, splits=5, **EVERYTHING) for t in HALVES),
    Case("sinks with more splits than tiles", sinks=True, splits=16),
    Case("more splits than the window has tiles", window=3, splits=4),
    Case("edges of tiles", contexts=(31, 32, 33, 63, 64, 65), query_lengths=(31, 32, 33, 2, 64, 1)),
    Case("chunks that end on the edges of query tiles", contexts=(96, 64, 97), query_lengths=(32, 64, 33)),
    Case("no sequence with a token", contexts=(0, 0), query_lengths=(0, 0)),
    Case("a single sequence of one token", contexts=(1,), query_lengths=(1,)),
    Case("more sequences than are searched at a time", contexts=(3,) * 150, query_lengths=(2,) * 150),
)  # fmt: skip

SHARED: dict[str, Any] = {"shared_blocks": 3, "contexts": (0, 49, 63, 0, 64, 65, 100, 49)}
# Decode alone knows of shared blocks.
SHARED_CASES = (
    *(Case(f"shared blocks in {t}, head dims {k} and {v}", t, key_dim=k, value_dim=v, **SHARED)
      for t in BOUNDS for k, v in ((64, 64), (80, 80), (192, 128))),
    Case("shared blocks, a query head for each KV head", heads=3, kv_heads=3, **SHARED),
    Case("shared blocks, groups of 7 query heads", heads=14, kv_heads=2, **SHARED),
    Case("shared blocks, one KV head for 71 query heads", heads=71, kv_heads=1, shared_blocks=1, contexts=(0, 17, 40)),
    *(Case(f"{n} shared blocks of {size} slots", block_size=size, shared_blocks=n, contexts=(n * size + 1, 0, 90))
      for n, size in ((1, 1), (40, 1), (5, 8), (2, 32), (1, 64))),
    Case("shared blocks and a soft cap", softcap=2.0, **SHARED),
    Case("shared blocks and sinks", sinks=True, **SHARED),
    *(Case(f"shared blocks, soft cap and sinks in {n} splits", softcap=4.0, sinks=True, splits=n, **SHARED)
      for n in (2, 5)),
    Case("shared blocks with a window", window=21, **SHARED),
    Case("shared blocks of one sequence", shared_blocks=2, contexts=(40,)),
    Case("shared blocks and no sequence with a token", shared_blocks=2, contexts=(0, 0)),
    Case("shared blocks of more sequences than are searched at a time", heads=1, kv_heads=1, shared_blocks=1,
         contexts=(0,) * 130 + (17,) * 4),
)  # fmt: skip

STORAGE_CASES = tuple(
    Case(f"{t}, head dims {k} and {v}, blocks of {size} slots", t, key_dim=k, value_dim=v, block_size=size)
    for t, k, v, size in (
        (torch.float32, 64, 64, 16), (torch.float32, 80, 80, 1), (torch.float16, 96, 96, 8),
        (torch.bfloat16, 192, 128, 32), (torch.bfloat16, 256, 256, 256), (torch.bfloat16, 7, 5, 4),
    )
)  # fmt: skip


def check_decode(case: Case, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    clean, poisoned = _caches(case, [1] * len(case.contexts), generator)
    query = _randn(case, len(contexts), case.heads, case.key_dim, generator=generator)
    options = _options(case, generator)
    expected = reference.decode(query, *clean, contexts, **options)
    options["shared_blocks"] = case.shared_blocks
    with (
        mock.patch.object(triton_launch, "num_splits", return_value=case.splits),
        mock.patch.object(triton_launch, "sharing_pays", return_value=case.shared_blocks > 0),
    ):
        result = triton_form.decode(*_on(device, query, *poisoned, contexts), **_options_on(device, options))
    _compare(result, expected)


def check_prefill(case: Case, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    lengths = torch.tensor(case.query_lengths, dtype=torch.int32)
    # Two rows before each sequence belong to nobody.
    starts = (lengths + 2).cumsum(0, dtype=torch.int32) - lengths
    clean, poisoned = _caches(case, case.query_lengths, generator)
    num_tokens = int((lengths + 2).sum()) + 3
    query = _randn(case, num_tokens, case.heads, case.key_dim, generator=generator)
    options = _options(case, generator)
    expected = reference.prefill(query, *clean, contexts, starts, lengths, **options)
    ours = _on(device, query, *poisoned, contexts, starts, lengths)
    _compare(triton_form.prefill(*ours, **_options_on(device, options)), expected)


def check_storage(case: Case, device: str) -> None:
    """Write, copy and gather only move bits, so they must agree to the last one."""
    generator = torch.Generator().manual_seed(3)
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    (keys, values, tables), (_, _, poisoned_tables) = _caches(case, case.contexts, generator)
    fused = _randn(case, 2, 5, case.key_dim + case.value_dim, generator=generator)
    # Views of one projection with the heads in front, as attention layers hand them over.
    key, value = fused.transpose(0, 1).split([case.key_dim, case.value_dim], dim=2)
    slots = torch.tensor([3, -1, 2 * case.block_size, -1, case.block_size])
    # A chain: block 1 is both overwritten and copied.
    sources, targets = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 3])

    def store(form: Any, *given: Tensor) -> list[Tensor]:
        keys, values, key, value, slots, sources, targets, tables, contexts = given
        form.write_kv(key, value, keys, values, slots)
        form.copy_blocks(keys, values, sources, targets)
        form.copy_blocks(keys, values, targets[:1], sources[2:])
        dense = form.gather(keys, tables, contexts), form.gather(values, tables, contexts)
        return [keys, values, *dense]

    rest = (key, value, slots, sources, targets)
    expected = store(reference, keys.clone(), values.clone(), *rest, tables, contexts)
    ours = store(triton_form, *_on(device, keys.clone(), values.clone(), *rest, poisoned_tables, contexts))
    for result, judge in zip(ours, expected, strict=True):
        torch.testing.assert_close(result.cpu(), judge, rtol=0, atol=0)


def _caches(
    case: Case, query_lengths: Any, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """(keys, values, block tables), once clean and once with all that no query sees poisoned."""
    size = case.block_size
    blocks_per_seq = max(-(-max(case.contexts) // size), 1) + 1
    num_blocks = max(len(case.contexts) * blocks_per_seq, 5)
    keys = _randn(case, num_blocks, case.kv_heads, size, case.key_dim, generator=generator)
    values = _randn(case, num_blocks, case.kv_heads, size, case.value_dim, generator=generator)
    shuffled = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = shuffled[: len(case.contexts) * blocks_per_seq].view(len(case.contexts), blocks_per_seq)
    tables[:, : case.shared_blocks] = tables[0, : case.shared_blocks].clone()
    bad_keys, bad_values, bad_tables = (tensor.clone() for tensor in (keys, values, tables))
    for seq, (context, length) in enumerate(zip(case.contexts, query_lengths, strict=True)):
        first = 0 if case.window is None else max(0, context - length - case.window + 1)
        for index, block in enumerate(tables[seq].tolist()):
            positions = torch.arange(index * size, (index + 1) * size)
            hidden = (positions < first) | (positions >= context)
            if index >= case.shared_blocks:
                bad_keys[block, :, hidden] = float("nan")
                bad_values[block, :, hidden] = float("nan")
            if hidden.all():
                bad_tables[seq, index] = GARBAGE_IDS[index % len(GARBAGE_IDS)]
    return (keys, values, tables), (bad_keys, bad_values, bad_tables)


def _options(case: Case, generator: torch.Generator) -> dict[str, Any]:
    sinks = torch.randn(case.heads, generator=generator).to(case.dtype) if case.sinks else None
    scale = case.key_dim**-0.5
    return {"scale": scale, "window": case.window, "softcap": case.softcap, "sinks": sinks}


def _options_on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


def _on(device: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def _randn(case: Case, *shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(case.dtype)


def _compare(result: Tensor, expected: Tensor) -> None:
    absolute, relative = BOUNDS[expected.dtype]
    torch.testing.assert_close(result.cpu(), expected, atol=absolute, rtol=relative)


CHECKS = {
    **{f"decode: {case.name}": (check_decode, case) for case in CASES},
    **{f"decode: {case.name}": (check_decode, case) for case in SHARED_CASES},
    **{f"prefill: {case.name}": (check_prefill, case) for case in CASES},
    **{f"storage: {case.name}": (check_storage, case) for case in STORAGE_CASES},
}
