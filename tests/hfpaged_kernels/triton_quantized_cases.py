"""The cases of quantized caches that the Triton kernels must pass in the interpreter and on a device.

The judge reads the same bytes, so attention is compared as closely as that of plain caches, and what is written or
gathered is equal to the last bit; only the payload of a NaN is left open. Whatever a kernel must not read is poisoned
with 0xFF, which is NaN as a code of eight bits and as a scale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hfpaged_kernels import encoding as encodings
from hfpaged_kernels import quantizing, reference, triton_form, triton_launch
from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import Cache, QuantizedCache
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from triton_cases import EVERYTHING, GARBAGE_IDS, HALVES, SHARED, Case, _compare, _on, _options, _options_on

E = encodings
NAMES = {encoding: encoding.name for encoding in encodings.ENCODINGS} | {None: "native"}
# Those of the formats that a user can choose, and mixtures of them.
PAIRS = (
    (E.INT8, E.INT8), (E.FP8_E4M3, E.FP8_E4M3), (E.FP8_E5M2, E.FP8_E5M2),
    (E.FP8_E4M3_STATIC, E.FP8_E4M3_STATIC), (E.FP8_E5M2_STATIC, E.FP8_E5M2_STATIC),
    (E.INT8, E.INT4_GROUPS), (E.INT4_CHANNEL, E.INT4), (E.INT4_GROUPS, E.INT4_CHANNEL),
    (None, E.INT4), (E.INT4, None), (E.INT8, E.FP8_E4M3_STATIC),
)  # fmt: skip


@dataclass(frozen=True)
class QuantizedCase(Case):
    key: Encoding | None = None
    value: Encoding | None = None
    # The residual of each sequence, or None for caches without.
    residuals: tuple[int, ...] | None = None


def _named(case: QuantizedCase, words: str) -> QuantizedCase:
    kinds = f"keys {NAMES[case.key]}, values {NAMES[case.value]}, {str(case.dtype).removeprefix('torch.')}"
    return replace(case, name=f"{kinds}: {words}")


# Of 15, 33 and 37 tokens the last ones lie in residuals; 16 has a residual and does not read it, 17 has none.
CONTEXTS: dict[str, Any] = {"contexts": (15, 16, 17, 0, 33, 37), "query_lengths": (15, 1, 5, 0, 33, 19)}
RESIDUALS: dict[str, Any] = {"residuals": (2, 0, -1, -1, 1, 3)}
K8V4: dict[str, Any] = {"key": E.INT8, "value": E.INT4_GROUPS}
INT4: dict[str, Any] = {"key": E.INT4_CHANNEL, "value": E.INT4}


def _attention_cases() -> Iterator[QuantizedCase]:
    for index, (key, value) in enumerate(PAIRS):
        case = QuantizedCase("", key=key, value=value, **CONTEXTS)
        yield _named(case, "plainly")
        yield _named(replace(case, **EVERYTHING, **RESIDUALS), "window, soft cap, sinks and residuals")
        yield _named(replace(case, dtype=HALVES[index % 2], **RESIDUALS, splits=3), "residuals and splits")
    for kinds in (K8V4, INT4):
        case = QuantizedCase("", **kinds, **CONTEXTS)
        yield _named(replace(case, block_size=8), "blocks of 8 slots")
        for size in (1, 2, 32, 128):
            yield _named(replace(case, block_size=size, **RESIDUALS), f"residuals of {size} slots")
        for dtype, key_dim, value_dim in (
            (torch.bfloat16, 80, 80), (torch.float32, 96, 96), (torch.float16, 192, 128), (torch.float32, 8, 8),
        ):  # fmt: skip
            dims = {"key_dim": key_dim, "value_dim": value_dim, "dtype": dtype}
            yield _named(replace(case, **dims, **RESIDUALS), f"head dims {key_dim} and {value_dim}")
        yield _named(replace(case, dtype=torch.float16), "half precision without residuals")
        yield _named(replace(case, heads=14, **RESIDUALS), "groups of 7 query heads")
        yield _named(replace(case, **RESIDUALS, window=3), "a window inside the residuals")
        long = {"contexts": (15, 16, 170, 0, 300, 129), "query_lengths": (1, 1, 20, 0, 3, 40)}
        yield _named(replace(case, **long, **RESIDUALS, splits=8, dtype=torch.bfloat16), "8 splits")
    yield _named(QuantizedCase("", key=E.INT4_GROUPS, value=E.INT8, key_dim=96, value_dim=160), "groups of odd number")


def _shared_cases() -> Iterator[QuantizedCase]:
    residuals = (0, 1, 2, -1, 3, -1, 4, -1)
    for index, (key, value) in enumerate(PAIRS):
        dtype = (torch.float32, *HALVES)[index % 3]
        case = QuantizedCase("", dtype, key=key, value=value, residuals=residuals, sinks=True, **SHARED)
        yield _named(case, "shared blocks, sinks and residuals")
    yield _named(QuantizedCase("", **K8V4, splits=2, **SHARED), "shared blocks")
    yield _named(QuantizedCase("", **INT4, splits=2, softcap=2.0, block_size=8, **SHARED), "shared blocks")


def _storage_cases() -> Iterator[QuantizedCase]:
    for index, encoding in enumerate(encodings.ENCODINGS):
        case = QuantizedCase("", key=encoding, value=encoding, **CONTEXTS, **RESIDUALS)
        yield _named(case, "bytes")
        case = replace(case, heads=1, kv_heads=1)
        yield _named(replace(case, dtype=HALVES[index % 2], block_size=2), "bytes of 2 slots")
        for size, dim in (((1, 6), (32, 96)), ((4, 10), (8, 80)), ((128, 128), (16, 8)))[index % 3]:
            odd = replace(case, block_size=size, key_dim=dim, value_dim=dim)
            yield _named(odd, f"bytes of {size} slots of dim {dim}")
    yield _named(QuantizedCase("", key=None, value=E.FP8_E4M3), "bytes of keys as they are")
    yield _named(QuantizedCase("", torch.bfloat16, key=E.INT8, value=None), "bytes of values as they are")


def check_decode(case: QuantizedCase, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    clean, poisoned = _caches(case, [1] * len(contexts), generator)
    query = torch.randn(len(contexts), case.heads, case.key_dim, generator=generator).to(case.dtype)
    options = _options(case, generator) | {"residuals": _residuals(case)}
    expected = reference.decode(query, *clean, contexts, **options)
    options["shared_blocks"] = case.shared_blocks
    with (
        mock.patch.object(triton_launch, "num_splits", return_value=case.splits),
        mock.patch.object(triton_launch, "sharing_pays", return_value=case.shared_blocks > 0),
    ):
        ours = triton_form.decode(
            query.to(device), *_moved(poisoned, device), contexts.to(device), **_options_on(device, options)
        )
    _compare(ours, expected)


def check_prefill(case: QuantizedCase, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    contexts, lengths = (torch.tensor(counts, dtype=torch.int32) for counts in (case.contexts, case.query_lengths))
    starts = (lengths + 2).cumsum(0, dtype=torch.int32) - lengths
    clean, poisoned = _caches(case, case.query_lengths, generator)
    # Strided as a slice of a fused projection.
    query = torch.randn(int((lengths + 2).sum()), case.heads, 2 * case.key_dim, generator=generator).to(case.dtype)
    query = query[..., : case.key_dim]
    options = _options(case, generator) | {"residuals": _residuals(case)}
    expected = reference.prefill(query, *clean, contexts, starts, lengths, **options)
    places = _on(device, contexts, starts, lengths)
    ours = triton_form.prefill(query.to(device), *_moved(poisoned, device), *places, **_options_on(device, options))
    _compare(ours, expected)


def check_storage(case: QuantizedCase, device: str) -> None:
    """What is written, copied and gathered has the same bits."""
    generator = torch.Generator().manual_seed(3)
    contexts = torch.tensor(case.contexts, dtype=torch.int32)
    clean, poisoned = _caches(case, case.contexts, generator)
    results = []
    for form, (keys, values, tables), where in (
        (reference, (_copy_of(clean[0]), _copy_of(clean[1]), clean[2]), "cpu"),
        (triton_form, _moved(poisoned, device), device),
    ):
        dense = [
            form.gather(cache, tables, contexts.to(where), _options_on(where, {"r": _residuals(case)})["r"]).cpu()
            for cache in (keys, values)
        ]
        keys, values = (_copy_of(cache) for cache in _moved(clean[:2], where))
        _write(form, keys, values, case, where)
        results.append([*dense, *_read_bytes(keys), *_read_bytes(values)])
    for judge, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, judge, rtol=0, atol=0, equal_nan=True)


def check_residual_rows(case: QuantizedCase, device: str) -> None:
    """Residuals are written as plain caches, by way of a view that has the heads in front of the slots."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(3, case.kv_heads, case.key_dim, generator=generator).to(case.dtype)
    slots = torch.tensor([5, -1, case.block_size + 2])
    written = []
    for form, where in ((reference, "cpu"), (triton_form, device)):
        shape = (2, case.block_size, case.kv_heads, case.key_dim)
        keys, values = (torch.zeros(shape, dtype=case.dtype, device=where) for _ in range(2))
        rows, slots = rows.to(where), slots.to(where)
        form.write_kv(rows, -rows, keys.transpose(1, 2), values.transpose(1, 2), slots)
        written += [(keys.cpu(), values.cpu())]
    assert written[0][0].any()
    torch.testing.assert_close(written[1], written[0], rtol=0, atol=0)


def check_every_code(case: QuantizedCase, device: str) -> None:
    """All 256 codes of eight bits mean what torch says, and torch's rounding to them is ours at and beside each tie."""
    encoding = case.key
    assert encoding is not None
    cache = _empty(case, encoding, case.key_dim, 2, torch.Generator())
    cache = replace(cache, scales=torch.ones(case.kv_heads))
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(encoding.dtype).float()
    cache.codes[0] = codes.view(1, case.block_size, case.key_dim)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([case.block_size], dtype=torch.int32)
    moved = _moved((cache,), device)[0]
    dense = triton_form.gather(moved, table.to(device), length.to(device)).cpu()
    expected = numbers.view(case.block_size, case.key_dim).expand_as(dense[0])
    torch.testing.assert_close(dense[0], expected, rtol=0, atol=0, equal_nan=True)
    known = numbers[numbers.isfinite()].sort().values
    ties = (known[1:] + known[:-1]) / 2
    beside = [ties.nextafter(torch.full_like(ties, side)) for side in (-torch.inf, torch.inf)]
    rows = torch.cat([known, ties, *beside])
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % case.key_dim)).view(-1, 1, case.key_dim)
    for first in range(0, len(rows), case.block_size):
        some = rows[first : first + case.block_size].expand(-1, case.kv_heads, -1)
        slots = torch.arange(len(some), device=device)
        triton_form.write_kv(*_on(device, some, some), moved, moved, slots)
        # Zeros have a sign that the sum of two numbers may not keep, hence not the bytes.
        ours = moved.codes[0, 0, : len(some)].cpu().view(encoding.dtype).float()
        torch.testing.assert_close(ours, some[:, 0].to(encoding.dtype).float(), rtol=0, atol=0)


def _write(form: Any, keys: Cache, values: Cache, case: QuantizedCase, device: str) -> None:
    """Tokens, where an encoding can take them one by one, then blocks, then copies."""
    rows = _awkward_rows(case).to(device)
    # Behind the blocks that are written or copied as a whole.
    slots = torch.arange(len(rows), device=device) + 5 * case.block_size
    slots[3] = -1
    if all(not isinstance(cache, QuantizedCache) or cache.encoding.scales != "channel" for cache in (keys, values)):
        form.write_kv(rows, rows.flip(0), keys, values, slots)
    generator = torch.Generator().manual_seed(5)
    blocks = torch.tensor([2, 0, keys.shape[0] - 1])
    sources = torch.randint(len(rows), (3, case.block_size), generator=generator)
    # The second block has ordinary numbers only, the third one finite numbers.
    sources[1] = torch.randint(20, (case.block_size,), generator=generator)
    sources[2] = torch.tensor([0, 10, 20, 22, 23, 24, 31, 32, 33, 34, 35])[sources[2] % 11]
    for cache in (keys, values):
        if isinstance(cache, QuantizedCache):
            form.write_blocks(rows, cache, *_on(device, blocks, sources))
    # A chain: block 1 is both overwritten and copied.
    form.copy_blocks(keys, values, *_on(device, torch.tensor([2, 1, 0]), torch.tensor([1, 4, 3])))
    form.copy_blocks(keys, values, *_on(device, torch.tensor([2]), torch.tensor([0])))


def _awkward_rows(case: QuantizedCase) -> Tensor:
    """[num_rows, kv_heads, dim], a view with odd strides: 20 ordinary ones, then those where arithmetic has edges."""
    generator = torch.Generator().manual_seed(6)
    dim = case.key_dim
    fused = torch.randn(40, 2 * dim, case.kv_heads, generator=generator).to(case.dtype).transpose(1, 2)
    rows = fused[..., ::2]
    rows[10:20, :, 1] *= 300
    rows[20] = 0
    rows[21] = 3.0
    rows[22] *= 1e-39
    rows[23] *= 1e-41
    rows[24, :, 0] = 1e-45
    rows[24, :, 1:] = 0
    rows[25, :, 1] = float("nan")
    rows[26, :, 0] = float("inf")
    rows[27, :, 2] = -float("inf")
    rows[28] = float("inf")
    rows[29] = -float("inf")
    rows[30] *= 1e38
    rows[31] = rows[31].abs()
    rows[32] = -rows[32].abs()
    # With scales of 1, what lies between two codes; then all but one are ties.
    rows[33] = torch.arange(dim).remainder(255) - 127.0
    rows[34] = torch.arange(dim).remainder(60) + 0.5
    rows[34, :, 0] = 127.0
    rows[35] = torch.arange(dim).remainder(15) + 0.5
    rows[35, :, 0], rows[35, :, 1] = 0.0, 15.0
    rows[36, :, 0] = 2.0**126
    return rows


def _caches(case: QuantizedCase, query_lengths: Any, generator: torch.Generator) -> tuple[Any, Any]:
    """(keys, values, block tables), once clean and once with all that no query sees poisoned."""
    size = case.block_size
    per_seq = max(-(-max(case.contexts) // size), 1) + 1
    num_blocks = max(len(case.contexts) * per_seq, 5)
    keys = _filled(case, case.key, case.key_dim, num_blocks, generator)
    values = _filled(case, case.value, case.value_dim, num_blocks, generator)
    tables = torch.randperm(num_blocks, generator=generator)[: len(case.contexts) * per_seq].to(torch.int32)
    tables = tables.view(len(case.contexts), per_seq)
    tables[:, : case.shared_blocks] = tables[0, : case.shared_blocks].clone()
    bad_keys, bad_values, bad_tables = _copy_of(keys), _copy_of(values), tables.clone()
    for seq, (context, length) in enumerate(zip(case.contexts, query_lengths, strict=True)):
        first = 0 if case.window is None else max(0, context - length - case.window + 1)
        in_residual = context if _residual_of(case, seq) < 0 else context // size * size
        for index, block in enumerate(tables[seq].tolist()):
            positions = torch.arange(index * size, (index + 1) * size)
            for cache in (bad_keys, bad_values):
                end = in_residual if isinstance(cache, QuantizedCache) and cache.residual is not None else context
                if index >= case.shared_blocks:
                    _poison(cache, block, (positions < first) | (positions >= end))
            if ((positions < first) | (positions >= context)).all():
                bad_tables[seq, index] = GARBAGE_IDS[index % len(GARBAGE_IDS)]
        for cache in (bad_keys, bad_values):
            if isinstance(cache, QuantizedCache) and cache.residual is not None and _residual_of(case, seq) >= 0:
                cache.residual[_residual_of(case, seq), context - context // size * size :] = float("nan")
    return (keys, values, tables), (bad_keys, bad_values, bad_tables)


def _poison(cache: Cache, block: int, hidden: Tensor) -> None:
    if not isinstance(cache, QuantizedCache):
        cache[block, :, hidden] = float("nan")
        return
    cache.codes[block][:, hidden] = 0xFF
    if cache.encoding.scales == "token":
        cache.token_scales[block][:, hidden] = float("nan")
    if hidden.all():
        cache.data[block] = 0xFF


def _filled(
    case: QuantizedCase, encoding: Encoding | None, dim: int, num_blocks: int, generator: torch.Generator
) -> Cache:
    contents = torch.randn(num_blocks * case.block_size, case.kv_heads, dim, generator=generator)
    # Of very different sizes, as channels and tokens have: a wrong scale does not go unseen.
    contents *= 2 ** torch.randint(-2, 1, (len(contents), 1, 1), generator=generator)
    contents *= 2 ** torch.randint(-2, 1, (1, case.kv_heads, dim), generator=generator)
    rows = torch.arange(len(contents)).view(num_blocks, case.block_size)
    if encoding is None:
        return contents[rows].transpose(1, 2).contiguous().to(case.dtype)
    cache = _empty(case, encoding, dim, num_blocks, generator)
    quantizing.write_blocks(contents, cache, torch.arange(num_blocks), rows)
    return cache


def _empty(
    case: QuantizedCase, encoding: Encoding, dim: int, num_blocks: int, generator: torch.Generator
) -> QuantizedCache:
    size = case.block_size
    data = torch.zeros(num_blocks, case.kv_heads, encoding.head_bytes(size, dim), dtype=torch.uint8)
    scales = torch.rand(case.kv_heads, generator=generator) + 0.3 if encoding.scales == "head" else None
    residual = None
    if case.residuals is not None:
        shape = (max(case.residuals) + 1, size, case.kv_heads, dim)
        residual = torch.randn(shape, generator=generator).to(case.dtype)
    return QuantizedCache(data, encoding, size, dim, case.dtype, scales, residual)


def _residual_of(case: QuantizedCase, seq: int) -> int:
    return -1 if case.residuals is None else case.residuals[seq]


def _residuals(case: QuantizedCase) -> Tensor | None:
    return None if case.residuals is None else torch.tensor(case.residuals, dtype=torch.int32)


def _copy_of(cache: Cache) -> Cache:
    if not isinstance(cache, QuantizedCache):
        return cache.clone()
    residual = None if cache.residual is None else cache.residual.clone()
    return replace(cache, data=cache.data.clone(), residual=residual)


def _moved(caches: tuple[Any, ...], device: str) -> list[Any]:
    return [_moved_cache(cache, device) if isinstance(cache, QuantizedCache) else cache.to(device) for cache in caches]


def _moved_cache(cache: QuantizedCache, device: str) -> QuantizedCache:
    scales, residual = (None if x is None else x.to(device) for x in (cache.scales, cache.residual))
    return replace(cache, data=cache.data.to(device), scales=scales, residual=residual)


def _read_bytes(cache: Cache) -> list[Tensor]:
    """All that a block holds, as numbers where a NaN may be any NaN: codes, scales, and the codes of scales."""
    if not isinstance(cache, QuantizedCache):
        return [cache.cpu()]
    moved = _moved_cache(cache, "cpu")
    codes = moved.codes.contiguous()
    is_float = moved.encoding.dtype.is_floating_point
    parts = [codes.view(moved.encoding.dtype).float() if is_float else codes]
    if is_float:
        # The sign of a zero counts, too.
        parts += [codes.where(~parts[0].isnan(), 0)]
    if moved.encoding.scales == "token":
        parts += [moved.token_scales.float()]
    if moved.encoding.scales == "channel":
        parts += [moved.channel_codes, moved.channel_steps.float()]
    return parts


STATIC = (E.FP8_E4M3_STATIC, E.FP8_E5M2_STATIC)
CHECKS = {
    **{f"decode: {case.name}": (check_decode, case) for case in (*_attention_cases(), *_shared_cases())},
    **{f"prefill: {case.name}": (check_prefill, case) for case in _attention_cases()},
    **{f"storage: {case.name}": (check_storage, case) for case in _storage_cases()},
    **{f"every code: {NAMES[e]}": (check_every_code, QuantizedCase("", key=e, key_dim=16)) for e in STATIC},
    **{f"rows of residuals: {t}": (check_residual_rows, QuantizedCase("", t)) for t in (torch.float32, *HALVES)},
}  # fmt: skip
