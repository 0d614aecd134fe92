"""The rows of `hfpaged bench quant`. Free of torch, so that help and errors are quick.

Greedy tokens of a quantized cache part from the native ones sooner or later, so that no row compares tokens: both
sides are fed the same ones instead, step by step (teacher forced), and what they would have said is scored by
perplexity. Both also begin with the same keys and values of the prompt.
"""

from __future__ import annotations

from dataclasses import replace

from hfpaged.bench.catalog import Row
from hfpaged.bench.shape import Shape
from hfpaged.bench.target import Target

DECODE = "decode speed, batch {batch}, prompt {prompt}, {new} steps"
PERPLEXITY = "perplexity above theirs, {batch} texts, prompt {prompt}, {new} scored"
BYTES = "KV bytes, batch {batch}, prompt {prompt}, {new} new"

TO_NATIVE, TO_RIVALS, TEXTS, HELD = Shape(16, 1024, 64), Shape(16, 1024, 32), Shape(8, 512, 128), Shape(8, 512, 64)
FASTER, LOWER = Target(1.3), Target(below=0.0, is_share=True)


def _over_native(kv: str, target: Target | None) -> Row:
    return Row(f"{kv}-decode", f"{kv} over native, {DECODE}", f"quant_speed:{kv}", TO_NATIVE, target)


def _against(kind: str, what: str, module: str, shape: Shape, target: Target | None) -> tuple[Row, ...]:
    """One row for each library and number of bits."""
    pairs = (("int8", "hqq"), ("int4", "hqq"), ("int4", "quanto"))
    return tuple(
        Row(f"{kv}-{kind}{library}", f"{kv} and {library}, {what}", f"{module}:{kv}_{library}", shape, target)
        for kv, library in pairs
    )


QUANT_ROWS = (
    _over_native("int8", Target(1.0)),
    *(_over_native(kv, None) for kv in ("fp8_e4m3", "k8v4", "int4")),
    *_against("", DECODE, "quant_speed", TO_RIVALS, FASTER),
    *_against("ppl-", PERPLEXITY, "quant_perplexity", TEXTS, LOWER),
    *(replace(row, wants_less=True) for row in _against("bytes-", BYTES, "quant_bytes", HELD, None)),
)
