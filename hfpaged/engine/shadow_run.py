"""A sequence that has ended is computed once more, teacher forced, with transformers' own cache.

    tokens of the prompt | new tokens
    [ chunk ][ chunk ][ chunk ][ chu     up to the last position that was captured, nothing shared, nothing quantized
    [ prompt            ][1][1][1][1     where a model's tokens depend on that, as generate() computes them

Layers with a state, and positions that change with a prompt's length, make models of the second kind: a few of them
begin anew with a second chunk, or compute several tokens in another way than one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hfpaged import compat
from hfpaged.spread import input_device

ROWS_AT_ONCE = 4  # in float64, several times over


class NativeRun:
    """`tokens` are all that the sequence had, `live` its logits [vocab] by position. Afterwards `kl` is the divergence
    KL(native || live) in nats of each position, and `agreed` how many positions have the same likeliest token. With
    `prompt` the first so many tokens come at once, and all others one by one.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: list[int], live: Mapping[int, Tensor], prompt: int | None = None
    ) -> None:
        self._model, self._live, self._prompt = model, live, prompt
        self._tokens = tokens[: max(live)]
        self._cache = DynamicCache(config=model.config)
        names = inspect.signature(model.forward).parameters
        self._takes_keep, self._takes_positions = "logits_to_keep" in names, "position_ids" in names
        self.num_done = 0
        self.kl: list[float] = []
        self.agreed = 0

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self._tokens)

    @property
    def cache_bytes(self) -> int:
        """What the cache holds now."""
        tensors = [each for layer in self._cache.layers for each in vars(layer).values() if isinstance(each, Tensor)]
        return sum(each.nbytes for each in tensors)

    @torch.no_grad()
    def advance(self, count: int) -> int:
        """Compute up to `count` tokens, or the whole prompt; returns how many. Raises what the model raises."""
        start = self.num_done
        if self._prompt is None or not start:
            self._compute(min(start + (self._prompt or count), len(self._tokens)))
        while self._prompt is not None and self.num_done < min(start + count, len(self._tokens)):
            self._compute(self.num_done + 1)
        return self.num_done - start

    def _compute(self, stop: int) -> None:
        """The tokens up to there, in one forward."""
        start = self.num_done
        wanted = [position for position in range(start + 1, stop + 1) if position in self._live]
        logits = self._forward(start, stop, wanted)
        for first in range(0, len(wanted), ROWS_AT_ONCE):
            positions = wanted[first : first + ROWS_AT_ONCE]
            live = torch.stack([self._live[position] for position in positions])
            kl, agrees = divergence(logits[first : first + ROWS_AT_ONCE].cpu(), live)
            self.kl += kl.tolist()
            self.agreed += int(agrees.sum())
        self.num_done = stop

    def _forward(self, start: int, stop: int, wanted: list[int]) -> Tensor:
        """[max(wanted, 1), vocab]"""
        device = input_device(self._model)
        rows = torch.tensor([position - 1 - start for position in wanted] or [0], device=device)
        ids = torch.tensor([self._tokens[start:stop]], device=device)
        options = {"logits_to_keep": rows} if self._takes_keep else {}
        if self._takes_positions:  # a cache whose first layer keeps a state does not know them
            options["position_ids"] = torch.arange(start, stop, device=device)[None]
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
