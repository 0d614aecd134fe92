"""Calls of the model that all rows share: a prefill, and generate() for a fixed number of tokens."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.bench.setting import Setting
from hfpaged.bench.sides import Side
from hfpaged.bench.watch import Watch
from hfpaged.compat import cache_argument

Rows = list[list[int]]


def generate(
    model: PreTrainedModel, ids: Tensor, cache: Any, new: int, *, mask: Tensor | None = None,
    watch: Watch | None = None, **options: Any,
) -> Rows:  # fmt: skip
    """At most `new` tokens after each row of `ids` ([batch, length]), chosen without chance."""
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        stopping_criteria=[] if watch is None else [watch],
        **{cache_argument(): cache},
        **options,
    )
    rows: Rows = output[:, ids.shape[1] :].tolist()
    return rows


def first_tokens(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Fill `cache` with `ids`; the likeliest next tokens, [batch, 1]."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **{cache_argument(): cache}, **options
    )
    return output.logits[:, -1:].argmax(dim=-1)


@dataclass(frozen=True)
class Prefilled:
    """A cache that holds a prompt, and `ids`, the prompt with the first new token, to go on from many times."""

    model: PreTrainedModel
    side: Side
    ids: Tensor
    cache: Any

    @classmethod
    def of(cls, setting: Setting, side: Side, prompt: Tensor) -> Prefilled:
        side.switch(setting.model)
        cache = side.make_cache(setting.model)
        first = first_tokens(setting.model, prompt, cache)
        return cls(setting.model, side, torch.cat([prompt, first], dim=1), cache)

    def go_on(self, new: int, watch: Watch) -> Rows:
        """Exactly `new` tokens on a copy of the cache; the first new token stands before them."""
        self.side.switch(self.model)
        rows = generate(self.model, self.ids, copy.deepcopy(self.cache), new, watch=watch, min_new_tokens=new)
        return [[first, *row] for first, row in zip(self.ids[:, -1].tolist(), rows, strict=True)]
