"""Others on the same pool: generate() with PagedCaches, deep copies of them, and beams, beside the batcher."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch
from transformers import PreTrainedModel

from hfpaged import compat
from hfpaged.cache import PagedCache
from hfpaged.errors import OutOfBlocksError
from hfpaged.kv_pool import KVPool
from hfpaged.spread import input_device
from hfpaged.stress.mix import Mix
from hfpaged.stress.native import Checker

KEPT = 2  # copies that stay while the batcher goes on
NEW = 6  # tokens that are generated each time
SHARE = 0.05  # of the pool's tokens, at most, for the prompt of one


class OtherCaches:
    """One round at a time; what some leave behind stays until later rounds."""

    def __init__(self, model: PreTrainedModel, pool: KVPool, mix: Mix, rng: random.Random, checker: Checker) -> None:
        self._model, self._pool, self._mix, self._rng, self._checker = model, pool, mix, rng, checker
        self._kept: deque[PagedCache] = deque(maxlen=KEPT)
        tokens = pool.num_blocks // len(pool.groups) * pool.block_size
        self._longest = max(min(int(tokens * SHARE), mix.lengths.longest // 2), 1)
        self.rounds = self.out_of_blocks = 0

    def run(self) -> None:
        """One prompt by generate(), then two ways on from it: the cache itself, and a copy that shares its blocks."""
        self.rounds += 1
        prompt = self._mix.ids(self._rng.randint(1, self._longest))
        try:
            cache = self._cache()
            begun = self._generate(cache, prompt)
            fork = copy.deepcopy(cache)
            self._generate(fork, begun + self._mix.ids(2))
            self._generate(cache, begun + self._mix.ids(1))
            self._generate(self._cache(), prompt, num_beams=2)
            self._checker.offer(f"generate {self.rounds}", prompt, begun[len(prompt) :], NEW)
            self._kept.append(fork)
        except OutOfBlocksError:  # the batcher has them: an honest answer, and all blocks of these caches come back
            self.out_of_blocks += 1
        if self._rng.random() < 0.3:
            self.drop()

    def drop(self) -> None:
        """Forget all that is kept."""
        self._kept.clear()

    def _cache(self) -> PagedCache:
        return PagedCache(self._model, pool=self._pool)

    def _generate(self, cache: PagedCache, ids: list[int], **settings: Any) -> list[int]:
        given = torch.tensor([ids], device=input_device(self._model))
        settings = {"max_new_tokens": NEW, "do_sample": False, compat.cache_argument(): cache} | settings
        output: list[int] = self._model.generate(given, attention_mask=torch.ones_like(given), **settings)[0].tolist()
        return output
