"""Quantized caches against `simulated.py`: the same tokens and logits in every way to generate, patched or not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import simulated
import tiny_models
import torch
from hfpaged_kernels import encoding
from test_same_tokens import CACHE, IMPOSSIBLE, MODES, RAGGED, WHOLE, generate
from transformers import DynamicCache

import hfpaged
from hfpaged.kv_format import KVFormat

FORMATS: dict[str, Any] = {name: name for name in ("int8", "fp8_e4m3", "fp8_e5m2", "k8v4", "int4")}
FORMATS |= {"keys only": "int8/auto", "values only": "auto/int4"}
FORMATS |= {"by layer": {"default": "int4", "layers": {0: "int8"}}, "one layer": {"layers": {1: "k8v4"}}}
BLOCK = 8
# Of a largest logit. A number that lies between two codes may go to either side by the last bit of a sum; then this row
# differs by a part of one code, and no other row does.
TIGHT, ONE_CODE = 1e-4, 0.03
# Rows that are equal: what they have in common is computed once, and the last column sees it as it is stored. In
# prompts of one length that is all but the last token.
ALIKE = ("return_sequences", "beams", "beams_returned", "beams_sampled")
OWN_PADDING = ("bloom", "falcon", "mpt")  # models that look at padding, which is stored for them


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_near(outputs: list[Any], wanted: list[Any], prompts: int) -> None:
    for output, other in zip(outputs, wanted, strict=True):
        assert output.sequences.tolist() == other.sequences.tolist()
        for numbers in ("logits", "scores"):
            theirs = getattr(other, numbers, None)
            if theirs is not None:
                check_rows(torch.stack(getattr(output, numbers)), torch.stack(theirs), prompts)


def check_rows(ours: torch.Tensor, theirs: torch.Tensor, prompts: int) -> None:
    """[steps, rows, vocabulary]"""
    largest = theirs[theirs.isfinite()].abs().max()
    off = (ours - theirs).abs().nan_to_num(0, posinf=torch.inf) / largest
    off = off.unflatten(1, (prompts, -1)).amax(dim=(0, 2, 3)).sort().values
    assert off[-1] < ONE_CODE
    assert len(off) < 2 or off[-2] < TIGHT


def kept(lengths: list[int]) -> list[int]:
    """Padding on the left of each row."""
    return [max(lengths) - length for length in lengths]


@functools.cache
def expected(name: str, fmt: str, mode: str, lengths: tuple[int, ...], padding_counts: bool, alike: bool, size: int):
    model = tiny_models.shared(name)
    starts = None if padding_counts or MODES[mode].is_single else kept(list(lengths))
    cache = simulated.SimulatedCache(model.config, FORMATS[fmt], size, starts)
    how = MODES[mode]
    if alike:
        how = how._replace(arguments=how.arguments | {"prefill_chunk_size": max(lengths) - 1})
    return generate(model, how, cache, list(lengths))


def check(name: str, fmt: str, mode: str, lengths: list[int], is_patched: bool, size: int = BLOCK, **options) -> None:
    """An unpatched model tells the cache nothing of padding, which is stored then, and counted in blocks."""
    model = tiny_models.shared(name)
    alike = is_patched and mode in ALIKE and not options and name not in OWN_PADDING
    lengths = WHOLE if alike else lengths
    wanted = expected(name, fmt, mode, tuple(lengths), not is_patched or name in OWN_PADDING, alike, size)
    options |= {"block_size": size, "num_blocks": 900, "kv_dtype": FORMATS[fmt]}
    cache = hfpaged.PagedCache(**{"model": model} if is_patched else {"config": model.config}, **options)
    try:
        outputs = generate(model, MODES[mode], cache, lengths)
    finally:
        hfpaged.unpatch(model)
    assert_near(outputs, wanted, 1 if MODES[mode].is_single else len(lengths))
    check_freed(cache)


def check_freed(cache: hfpaged.PagedCache) -> None:
    pool = cache.pool
    pool.check_integrity()
    cache.free()
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks > 0
    assert pool.residuals is None or pool.residuals.num_open == 0


patched_or_not = pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_in_every_way_to_generate(fmt, mode):
    check("llama", fmt, mode, RAGGED, True)


@pytest.mark.parametrize(
    ("fmt", "mode"),
    [(fmt, mode) for row, fmt in enumerate(FORMATS) for column, mode in enumerate(MODES) if (row + column) % 3 == 0]
    + [(fmt, "greedy") for fmt in FORMATS],
)
def test_every_format_and_every_way_without_a_patch(fmt, mode):
    """Dense views know nothing of the way, and ways nothing of the format: each pair need not be there."""
    check("llama", fmt, mode, RAGGED, False)


@pytest.mark.parametrize("mode", ALIKE)
@pytest.mark.parametrize("fmt", ["int8", "k8v4", "int4"])
def test_rows_that_are_equal_but_not_shared(fmt, mode):
    check("llama", fmt, mode, RAGGED, True, prefix_sharing=False)


OTHERS = [name for name in tiny_models.TABLE if name != "llama"]
WINDOWS = ("mistral", "gemma2", "gpt_oss")  # where whole blocks are let go of: each way with each format
KINDS = [
    (name, fmt, mode)
    for row, name in enumerate(OTHERS)
    for column, mode in enumerate(["greedy", "chat", "beams", "assisted", "unpatched"])
    for turn, fmt in enumerate(["int8", "int4"])
    if name in WINDOWS or (row + column + turn) % 2 == 0
]


@pytest.mark.parametrize(("name", "fmt", "mode"), KINDS)
def test_every_kind_of_model(name, fmt, mode):
    if (name, mode) in IMPOSSIBLE:
        pytest.skip("impossible for transformers' own cache too")
    check(name, fmt, "greedy" if mode == "unpatched" else mode, RAGGED, mode != "unpatched")


@patched_or_not
@pytest.mark.parametrize("lengths", [[15, 16, 17], [33, 7, 32]], ids=str)
@pytest.mark.parametrize("fmt", ["int8", "k8v4", "int4", "by layer"])
@pytest.mark.parametrize("size", [1, 16, 32])
def test_every_block_size(size, fmt, lengths, is_patched):
    check("llama", fmt, "chat", lengths, is_patched, size)


@pytest.mark.parametrize("mode", ["chat", "chunked_prefill", "assisted_by_itself"])
@pytest.mark.parametrize("length", [12, 24, 25])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_prompts_around_the_edge_of_a_window(fmt, name, length, mode):
    if (name, mode) in IMPOSSIBLE:
        pytest.skip("impossible for transformers' own cache too")
    check(name, fmt, mode, [length, length + 9, length - 9], True, 4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_judge_sees_what_a_format_does(fmt):
    """Logits behind the first ones differ from those of a native cache; the first ones do not."""
    model = tiny_models.shared("llama")
    native = generate(model, MODES["greedy"], DynamicCache(config=model.config), WHOLE)[0].logits
    judged = expected("llama", fmt, "greedy", tuple(WHOLE), False, False, BLOCK)[0].logits
    assert torch.equal(native[0], judged[0])
    assert (native[1] - judged[1]).abs().amax(-1).min() > 20 * TIGHT


@patched_or_not
@pytest.mark.parametrize("code", [encoding.FP8_E4M3_STATIC, encoding.FP8_E5M2_STATIC], ids=lambda code: code.name)
def test_scales_of_heads_that_were_measured_before(code, is_patched):
    model = tiny_models.shared("llama")
    scales = {layer: (torch.tensor([0.02, 0.01 + layer]), torch.tensor([0.005, 0.05])) for layer in range(2)}
    groups = hfpaged.PagedCache(config=model.config).pool.groups
    fmt = KVFormat("static", code, code)
    pool = hfpaged.KVPool(groups, block_size=BLOCK, kv_format=fmt, num_blocks=100, scales=scales)
    cache = hfpaged.PagedCache(**{"model": model} if is_patched else {"config": model.config}, pool=pool)
    try:
        outputs = generate(model, MODES["chat"], cache, RAGGED)
    finally:
        hfpaged.unpatch(model)
    judge = simulated.SimulatedCache(model.config, None, BLOCK, kept(RAGGED), scales, (code, code))
    assert_near(outputs, generate(model, MODES["chat"], judge, RAGGED), len(RAGGED))


@pytest.mark.parametrize("fmt", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_the_first_forward_sees_what_the_model_computed(name, fmt):
    """In every model and by every way; a row that is padding only is nothing yet."""
    model = tiny_models.shared(name)
    inputs = tiny_models.prompts([40, 1, 27])
    with torch.no_grad():
        native = model(**inputs).logits[:, -1]
        for config in (model.config, None):
            cache = hfpaged.PagedCache(None if config else model, config=config, num_blocks=300, kv_dtype=fmt)
            logits = model(**inputs, **{CACHE: cache}).logits[:, -1]
            hfpaged.unpatch(model)
            torch.testing.assert_close(logits, native, atol=1e-4, rtol=1e-4)
