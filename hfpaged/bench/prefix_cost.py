"""Row no-match: what looking up and publishing cost where no two prompts begin alike.

Less than one step's noise, so that whole runs cannot tell. Two caches, one with sharing and one without, go through
the same prompt together, each step of the one beside the same step of the other. Of each step the median difference
over the prompts counts, and the sum of these is the cost of a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import hfpaged
from hfpaged.bench.prefix_prompts import unlike
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN
from hfpaged.compat import cache_argument

PAIRS = 8  # prompts at least
HELD = 3  # prompts that a pool has room for: from then on blocks are evicted too
WARM_UP = HELD + 1  # prompts without new tokens

Walk = Iterator[Tensor]


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the cost as a part of a run without sharing: prefill, `shape.new` steps and giving all back."""
    pairs = 1 if setting.is_quick else max(PAIRS, setting.repeats)
    prompts = unlike(setting, WARM_UP + pairs, shape.prompt)
    PAGED.switch(setting.model)
    pools = {shares: _make_pool(setting, shape) for shares in (True, False)}
    costs, bases, same = [], [], True
    for number, prompt in enumerate(prompts.split(1)):
        caches = {shares: _make_cache(setting, pools, shares) for shares in pools}
        new = shape.new if number >= WARM_UP else 1
        seconds, tokens = _side_by_side(setting, prompt, caches, new, number)
        same = same and tokens[True] == tokens[False]
        if number >= WARM_UP:
            costs.append([on - off for on, off in zip(seconds[True], seconds[False], strict=True)])
            bases.append(seconds[False])
    same = same and tokens[True] == _plain_tokens(setting, prompt, shape.new)
    cost, base = (sum(map(statistics.median, zip(*runs, strict=True))) for runs in (costs, bases))
    hits = pools[True].stats().prefix_hits
    note = f"{1e3 * cost:+.1f} of {1e3 * base:.0f} ms; {pairs} pairs, {hits} tokens found"
    return Measured(cost / base, same_tokens=same, note=note)


def _make_pool(setting: Setting, shape: Shape) -> Any:
    pool = hfpaged.PagedCache(setting.model).pool
    blocks = -(-(shape.prompt + shape.new) // pool.block_size) * len(pool.groups)
    return hfpaged.PagedCache(setting.model, num_blocks=HELD * blocks).pool


def _make_cache(setting: Setting, pools: dict[bool, Any], shares: bool) -> Any:
    return hfpaged.PagedCache(setting.model, pool=pools[shares], prefix_sharing=shares)


def _side_by_side(
    setting: Setting, prompt: Tensor, caches: dict[bool, Any], new: int, number: int
) -> tuple[dict[bool, list[float]], dict[bool, list[int]]]:
    """Seconds of each step and the tokens, with and without sharing."""
    walks = {shares: _walk(setting, prompt, cache, new) for shares, cache in caches.items()}
    seconds: dict[bool, list[float]] = {shares: [] for shares in walks}
    tokens: dict[bool, list[int]] = {shares: [] for shares in walks}
    for step in range(new + 1):
        for shares in (True, False) if (step + number) % 2 else (False, True):
            start = time.perf_counter()
            token = next(walks[shares], None)  # None at last, when the cache is given back
            setting.synchronize()
            seconds[shares].append(time.perf_counter() - start)
            tokens[shares] += [] if token is None else [int(token)]
    return seconds, tokens


def _walk(setting: Setting, prompt: Tensor, cache: Any, new: int) -> Walk:
    """The likeliest tokens, one for each step, with what generate() would give to the model; then frees the cache."""
    ids, length = prompt, 0
    for _ in range(new):
        positions = torch.arange(length, length + ids.shape[1], device=ids.device)[None]
        length += ids.shape[1]
        mask = torch.ones(1, length, dtype=torch.long, device=ids.device)
        given = {"attention_mask": mask, "position_ids": positions, cache_argument(): cache}
        ids = setting.model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits[:, -1:].argmax(-1)
        yield ids
    if hasattr(cache, "free"):
        cache.free()


def _plain_tokens(setting: Setting, prompt: Tensor, new: int) -> list[int]:
    PLAIN.switch(setting.model)
    return [int(token) for token in _walk(setting, prompt, PLAIN.make_cache(setting.model), new)]
