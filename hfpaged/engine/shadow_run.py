"""A sequence that has ended is computed once more, teacher forced, with transformers' own cache.

tokens of the prompt | new tokens
[ chunk ][ chunk ][ chunk ][ chu     up to the last position that was captured, nothing shared, nothing quantized
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hfpaged import compat

ROWS_AT_ONCE = 4  # in float64, several times over


class NativeRun:
    """`tokens` are all that the sequence had, `live` its logits [vocab] by position. Afterwards `kl` is the divergence
    KL(native || live) in nats of each position, and `agreed` how many positions have the same likeliest token.
    """

    def __init__(self, model: PreTrainedModel, tokens: list[int], live: Mapping[int, Tensor]) -> None:
        self._model, self._live = model, live
        self._tokens = tokens[: max(live)]
        self._cache = DynamicCache(config=model.config)
        self._takes_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.num_done = 0
        self.kl: list[float] = []
        self.agreed = 0

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self._tokens)

    @property
    def cache_bytes(self) -> int:
        """What the cache will hold at the end, by what it holds now."""
        tensors = [each for layer in self._cache.layers for each in vars(layer).values() if isinstance(each, Tensor)]
        return sum(each.nbytes for each in tensors) * len(self._tokens) // max(self.num_done, 1)

    @torch.no_grad()
    def advance(self, count: int) -> int:
        """Compute up to `count` tokens; returns how many. Raises what the model raises."""
        start, stop = self.num_done, min(self.num_done + count, len(self._tokens))
        wanted = [position for position in range(start + 1, stop + 1) if position in self._live]
        logits = self._forward(start, stop, wanted)
        for first in range(0, len(wanted), ROWS_AT_ONCE):
            positions = wanted[first : first + ROWS_AT_ONCE]
            live = torch.stack([self._live[position] for position in positions])
            kl, agrees = divergence(logits[first : first + ROWS_AT_ONCE].cpu(), live)
            self.kl += kl.tolist()
            self.agreed += int(agrees.sum())
        self.num_done = stop
        return stop - start

    def _forward(self, start: int, stop: int, wanted: list[int]) -> Tensor:
        """[max(wanted, 1), vocab]"""
        device = self._model.device
        rows = torch.tensor([position - 1 - start for position in wanted] or [0], device=device)
        ids = torch.tensor([self._tokens[start:stop]], device=device)
        options = {"logits_to_keep": rows} if self._takes_keep else {}
        output = self._model(input_ids=ids, use_cache=True, **{compat.cache_argument(): self._cache}, **options)
        logits: Tensor = output.logits[0] if self._takes_keep else output.logits[0, rows]
        logits[0, 0].item()  # wait for the device: what this took is measured
        return logits


def divergence(native: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """KL(native || live) in nats and whether both have the same likeliest token, [rows] each, of logits [rows, vocab].
    In float64, as small divergences are differences of nearly equal numbers.
    """
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (native, live))
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))  # no mass, no term
    return terms.sum(dim=-1), native.argmax(dim=-1) == live.argmax(dim=-1)
