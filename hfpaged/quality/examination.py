"""Examines formats at one context length, and the layers and heads of one format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfpaged.quality.contexts import Context
from hfpaged.quality.figures import Figures
from hfpaged.quality.generations import NEW, PROMPTS, Parting, compare_generations
from hfpaged.quality.heads import rank_heads
from hfpaged.quality.layers import SHOWN, alone, exempting, paged_layers, rank_layers
from hfpaged.quality.lockstep import compare
from hfpaged.quality.metrics import TokenScores, summarize
from hfpaged.quality.progress import Begin
from hfpaged.quality.sides import Footprint, Side
from hfpaged.quality.subject import Subject

RANKED_TEXTS = 4  # every layer is run alone, and 500 tokens are enough to see which are worst


def examine(subject: Subject, context: Context, sides: Sequence[Side], begin: Begin) -> list[Figures]:
    """The figures of each side, in their order."""
    texts = subject.texts(context)
    batches = list(subject.batches(texts))
    name = f"{context.name}: {len(texts)} texts of {context.cached} tokens"
    scores = compare(subject.model, batches, context, sides, begin(name, len(batches) * context.fed))
    # Half of a short text is its prompt, and NEW tokens at least are generated where the model has room for them.
    new = min(NEW, context.cached // 2)
    prompts = next(iter(subject.batches(texts[:PROMPTS, : context.cached - new])))
    begin(f"{context.name}: {len(prompts)} greedy generations of {new} tokens", 1)
    partings = compare_generations(subject.model, prompts, sides, new)
    return [
        _figures(subject, context, side, size, of_side, parting, new)
        for side, size, of_side, parting in zip(sides, subject.sizes[1:], scores, partings, strict=True)
    ]


def rank(subject: Subject, context: Context, side: Side, begin: Begin) -> dict[str, Any]:
    """Layers and heads of `side`, the worst first, and the `kv_dtype` that keeps the worst layers native."""
    texts = subject.texts(context)[:RANKED_TEXTS]
    sides = {layer: alone(side, layer) for layer in paged_layers(subject.model)}
    batches = list(subject.batches(texts, caches=len(sides) + 1))
    name = f"{context.name}: {len(sides)} layers, each alone in {side.name}"
    tick = begin(name, len(batches) * context.fed)
    layers = rank_layers(subject.model, batches, context, sides, tick)
    heads = rank_heads(subject.model, batches[0][:, : context.cached], side)
    return {"layers": layers, "heads": heads, "exempting": exempting(side, layers[:SHOWN])}


def _figures(
    subject: Subject, context: Context, side: Side, size: Footprint, scores: TokenScores, parting: Parting, new: int
) -> Figures:
    return Figures(
        format=side.name,
        context=context,
        scored=scores.kl.numel(),
        **summarize(scores)._asdict(),
        generated=new,
        parts_at=parting.parts_at,
        equal_generations=parting.equal,
        rouge_l=parting.rouge_l,
        bytes_per_token=size.per_token,
        bytes_per_sequence=size.per_sequence,
        of_native=size.per_token / subject.native_bytes,
        of_bfloat16=size.per_token / subject.bfloat16_bytes,
        kl_by_position=tuple(scores.kl.mean(dim=0).tolist()),
    )
