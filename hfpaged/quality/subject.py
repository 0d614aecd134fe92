"""What is judged: one model on one corpus, in batches that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.bench.setting import Setting
from hfpaged.pool_size import free_memory
from hfpaged.quality.contexts import Context
from hfpaged.quality.corpus import Corpus
from hfpaged.quality.sides import Footprint, Side
from hfpaged.spread import input_device

MEMORY_SHARE = 0.25  # of what is free, for the caches of one batch
BATCH_TOKENS = 16_384  # more in one cache makes nothing faster


@dataclass(frozen=True)
class Subject:
    """`sizes` are what the native cache and each side take, in their order."""

    model: PreTrainedModel
    corpus: Corpus
    num_texts: int
    sizes: Sequence[Footprint]

    @classmethod
    def of(cls, model: PreTrainedModel, corpus: Corpus, num_texts: int, sides: Sequence[Side]) -> Subject:
        return cls(model, corpus, num_texts, [side.footprint(model) for side in sides])

    @property
    def positions(self) -> int | None:
        return self._setting.positions

    def header(self) -> dict[str, Any]:
        """What the figures depend on."""
        header = {name: value for name, value in self._setting.header().items() if name not in ("repeats", "quick")}
        return header | {"data": f"{self.corpus.name}, {len(self.corpus.ids):,} tokens"}

    def texts(self, context: Context) -> Tensor:
        """[texts, context.cached + 1] where the model is."""
        return self.corpus.texts(context, self.num_texts).to(input_device(self.model))

    def batches(self, texts: Tensor, caches: int | None = None) -> Iterator[Tensor]:
        """The rows of `texts` in parts, so small that one cache of each side fits, or `caches` native ones."""
        per_token = sum(size.per_token for size in self.sizes) if caches is None else caches * self.native_bytes
        fitting = int(MEMORY_SHARE * free_memory(input_device(self.model)) / per_token)
        rows = max(1, min(fitting, BATCH_TOKENS) // texts.shape[1])
        yield from texts.split(rows)

    @property
    def native_bytes(self) -> float:
        return self.sizes[0].per_token

    @property
    def bfloat16_bytes(self) -> float:
        """As many numbers as the native cache keeps, two bytes each."""
        return self.native_bytes * torch.bfloat16.itemsize / self.model.dtype.itemsize

    @property
    def _setting(self) -> Setting:
        return Setting(self.model, None, 1, False)
