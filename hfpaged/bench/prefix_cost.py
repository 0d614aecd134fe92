"""Row no-match: what looking up and publishing cost where no two prompts begin alike.

Less than one step's noise, so that whole runs cannot tell. Two caches, one with sharing and one without, go through
the same prompt together, each step of the one beside the same step of the other. Where their blocks happen to lie
decides as much as sharing does, so the two pools change sides from one prompt to the next:

    prompt    0    1    2    3
    sharing   A    B    A    B
    without   B    A    B    A
              '-one-'   '-one-'   difference for each step
Of each step the median difference counts, and the sum of these is the cost of a run.
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

PROMPTS = 8  # at least
WARM_UP = 2

Walk = Iterator[Tensor]
Times = dict[bool, list[float]]  # seconds of each step, with and without sharing


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the cost as a part of a run without sharing: prefill, `shape.new` steps and giving all back."""
    count = 2 if setting.is_quick else max(PROMPTS, setting.repeats + setting.repeats % 2)
    prompts = unlike(setting, 2 * (WARM_UP + count), shape.prompt)
    PAGED.switch(setting.model)
    pools = [_make_pool(setting, shape), _make_pool(setting, shape)]
    times: list[Times] = []
    same = True
    for number, (before, prompt) in enumerate(zip(prompts[::2].split(1), prompts[1::2].split(1), strict=True)):
        pools.reverse()
        caches = _make_caches(setting, pools, before)
        seconds, tokens = _side_by_side(setting, prompt, caches, shape.new if number >= WARM_UP else 1, number)
        same = same and tokens[True] == tokens[False]
        times += [seconds] if number >= WARM_UP else []
    same = same and tokens[True] == _plain_tokens(setting, prompt, shape.new)
    cost, base = cost_of(times)
    hits = sum(pool.stats().prefix_hits for pool in pools)
    note = f"{1e3 * cost:+.1f} of {1e3 * base:.0f} ms; {count} prompts, {hits} tokens found"
    return Measured(cost / base, same_tokens=same, note=note, values=_by_pair(times))


def _by_pair(times: list[Times]) -> tuple[float, ...]:
    """The same of each two prompts alone."""
    pairs = zip(times[::2], times[1::2], strict=True)
    return tuple(cost / base for cost, base in map(cost_of, map(list, pairs)))


def cost_of(times: list[Times]) -> tuple[float, float]:
    """(seconds that sharing costs, seconds of a run without) of an even number of prompts: see the file's drawing."""
    costs = []
    for first, second in zip(times[::2], times[1::2], strict=True):
        with_it, without = (zip(first[shares], second[shares], strict=True) for shares in (True, False))
        costs.append([(sum(on) - sum(off)) / 2 for on, off in zip(with_it, without, strict=True)])
    bases = [seconds[False] for seconds in times]
    return _sum_of_medians(costs), _sum_of_medians(bases)


def _sum_of_medians(runs: list[list[float]]) -> float:
    return sum(map(statistics.median, zip(*runs, strict=True)))


def _make_pool(setting: Setting, shape: Shape) -> Any:
    pool = hfpaged.PagedCache(setting.model).pool
    blocks = -(-(shape.prompt + shape.new) // pool.block_size) * len(pool.groups)
    return hfpaged.PagedCache(setting.model, num_blocks=blocks).pool


def _make_caches(setting: Setting, pools: list[Any], before: Tensor) -> dict[bool, Any]:
    """One that shares, on a pool full of what it must evict, and one that does not, on a pool of which all is free."""
    shares, does_not = pools
    list(_walk(setting, before, hfpaged.PagedCache(setting.model, pool=shares), 1))
    does_not.drop_prefixes()
    return {
        True: hfpaged.PagedCache(setting.model, pool=shares),
        False: hfpaged.PagedCache(setting.model, pool=does_not, prefix_sharing=False),
    }


def _side_by_side(
    setting: Setting, prompt: Tensor, caches: dict[bool, Any], new: int, number: int
) -> tuple[Times, dict[bool, list[int]]]:
    """Seconds of each step and the tokens, with and without sharing."""
    walks = {shares: _walk(setting, prompt, cache, new) for shares, cache in caches.items()}
    seconds: Times = {shares: [] for shares in walks}
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
