"""Right first: some requests are computed again, alone, and their tokens must be the same."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hfpaged import compat
from hfpaged.cache import PagedCache
from hfpaged.kv_format import Spec
from hfpaged.spread import input_device
from hfpaged.stress.share import TimeShare

WAITING = 8  # finished requests of which one is chosen next: the newest ones
SHARE = 0.1  # of the time
# How far the token that was chosen may lie behind the one that is best when the request is alone. In float32 sums in
# another order move logits by less than the first. What rounds (16 bits, quantized formats) may read a part of a prompt
# rounded or not: less than the second, in standard deviations of all logits there. A token by chance is 3 to 4 behind.
EXACT, ROUNDED = 1e-3, 1.5


@dataclass(frozen=True)
class Difference:
    """A request whose tokens part at `position` of the new ones, by `gap` logits; `got` is None where they ended."""

    request: str
    position: int
    prompt_tokens: int
    expected: int
    got: int | None
    gap: float

    def __str__(self) -> str:
        if self.got is None:
            return f"{self.request} ({self.prompt_tokens} prompt tokens): it ended before new token {self.position}"
        return (
            f"{self.request} ({self.prompt_tokens} prompt tokens): new token {self.position} is {self.got}, and alone "
            f"{self.expected}, {self.gap:.3g} logits better"
        )


class Checker:
    """Compares with transformers' DynamicCache; where the KV format rounds what the model computes, with a PagedCache
    of the same format, alone.
    """

    def __init__(self, model: PreTrainedModel, kv_dtype: Spec, block_size: int) -> None:
        self._model, self._kv_dtype, self._block_size = model, kv_dtype, block_size
        self.is_native = kv_dtype == "auto"
        self.is_exact = self.is_native and model.dtype == torch.float32
        self._offered: deque[tuple[str, list[int], list[int], int]] = deque(maxlen=WAITING)
        self._time = TimeShare(SHARE)
        self.checked = self.close = 0
        self.differences: list[Difference] = []

    def offer(self, request: str, prompt: list[int], tokens: list[int], asked: int) -> None:
        """A greedy request has finished that was to have `asked` tokens."""
        self._offered.append((request, prompt, tokens, asked))

    def check_some(self, elapsed: float) -> None:
        """Compute one again, if there is time."""
        if self._offered and self._time.is_due(elapsed):
            with self._time:
                self._check(*self._offered.popleft())

    def _check(self, request: str, prompt: list[int], tokens: list[int], asked: int) -> None:
        out = self._alone(prompt, asked)
        alone: list[int] = out.sequences[0, len(prompt) :].tolist()
        self.checked += 1
        for position, (expected, got) in enumerate(zip(alone, tokens, strict=False)):
            if expected != got:
                scores = out.scores[position][0]
                gap = float(scores.max() - scores[got])
                if gap <= (EXACT if self.is_exact else ROUNDED * float(scores.std())):  # not so for NaN
                    self.close += 1
                else:
                    self.differences.append(Difference(request, position, len(prompt), expected, got, gap))
                return
        if len(tokens) < len(alone):
            at = len(tokens)
            self.differences.append(Difference(request, at, len(prompt), alone[at], None, math.nan))

    def _alone(self, prompt: list[int], new: int) -> Any:
        ids = torch.tensor([prompt], device=input_device(self._model))
        cache = DynamicCache(config=self._model.config) if self.is_native else self._paged(len(prompt) + new)
        return self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            return_dict_in_generate=True, output_scores=True, **{compat.cache_argument(): cache},
        )  # fmt: skip

    def _paged(self, length: int) -> PagedCache:
        blocks = 4 * (length // self._block_size + 2)
        return PagedCache(
            self._model, kv_dtype=self._kv_dtype, block_size=self._block_size, num_blocks=blocks, publish=False
        )
