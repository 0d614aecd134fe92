"""Feeds the same tokens to several caches at once and compares what the model says after each of them.

    text      t0 t1 ... | tp   tp+1 ... tL-1 | tL
                prompt  |      fed one by one  |
              one forward  each one scored against the token behind it

The prompt is computed in one forward, in which every format attends to keys and values that are not quantized yet:
that is how the cache works, so what it predicts is not scored. All later tokens read what the cache gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.cache import PagedCache
from hfpaged.quality.contexts import Context
from hfpaged.quality.forward import forward
from hfpaged.quality.metrics import TokenScores, log_probs, score
from hfpaged.quality.sides import NATIVE


class CacheMaker(Protocol):
    """A side of the comparison: a KV format of ours, or another cache of transformers."""

    def make_cache(self, model: PreTrainedModel) -> Any: ...


def compare(
    model: PreTrainedModel, batches: Iterable[Tensor], context: Context, sides: Sequence[CacheMaker],
    tick: Callable[[], None],
) -> list[TokenScores]:  # fmt: skip
    """For each side its scores [texts, context.fed] on the CPU. `batches` are token ids [rows, context.cached + 1];
    `tick` is called after each token that was fed.
    """
    parts = [_compare_batch(model, batch, context, sides, tick) for batch in batches]
    return [joined(of_side, dim=0) for of_side in zip(*parts, strict=True)]


def joined(parts: Sequence[TokenScores], dim: int) -> TokenScores:
    """Scores of several batches, or of several positions, as one."""
    return TokenScores(*(torch.cat(tensors, dim=dim) for tensors in zip(*parts, strict=True)))


def _compare_batch(
    model: PreTrainedModel, batch: Tensor, context: Context, sides: Sequence[CacheMaker], tick: Callable[[], None]
) -> list[TokenScores]:
    caches = [side.make_cache(model) for side in (NATIVE, *sides)]
    try:
        for cache in caches:
            forward(model, batch[:, : context.prompt], cache)
        steps = []
        for position in range(context.prompt, context.cached):
            steps.append(_step(model, batch, position, caches))
            tick()
    finally:
        for cache in caches:
            if isinstance(cache, PagedCache):  # others leave nothing behind in a pool
                cache.free()
    return [joined(of_side, dim=1) for of_side in zip(*steps, strict=True)]


def _step(model: PreTrainedModel, batch: Tensor, position: int, caches: Sequence[Any]) -> list[TokenScores]:
    """Scores [rows, 1] of all caches but the first, which they are compared with."""
    ids, targets = batch[:, position : position + 1], batch[:, position + 1]
    native, *others = (log_probs(forward(model, ids, cache)) for cache in caches)
    scores = (score(native, other, targets) for other in others)
    return [TokenScores(*(tensor.unsqueeze(1).cpu() for tensor in parts)) for parts in scores]
