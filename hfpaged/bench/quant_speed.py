"""Rows *-decode, int8-hqq, int4-hqq and int4-quanto: tokens per second of quantized caches.

Each step of the one side stands beside the same step of the other, with the same token, and the median step of a walk
counts. transformers' caches quantize all they hold again after every 128th token (their default); these steps are rare
and long, and rows are shorter than that. Each turn is a walk of its own, over caches that are filled anew.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import HQQ_4, HQQ_8, QUANTO_4, Rival, not_measured, obstacle
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import Side, in_format
from hfpaged.bench.stored_prompts import States, fill, keeps_more, prompt_states
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import in_turn
from hfpaged.quality.forward import forward

WARM_UP = 4  # of the steps, not counted: the kernels compile here


def over_native(kv_dtype: str, setting: Setting, shape: Shape) -> Measured:
    """The value is the speed of a format over that of the native PagedCache."""
    if keeps_more(setting):
        return not_measured("this model keeps more of a prompt than keys and values")
    found = in_pairs(*_speeds(setting, shape, in_format("auto"), in_format(kv_dtype)), "tok/s", None)
    note = f"native PagedCache {found.plain:.1f} tok/s"
    return replace(found, plain=None, plain_runs=(), note=note)  # transformers has no part in it


def over_rival(kv_dtype: str, rival: Rival, setting: Setting, shape: Shape) -> Measured:
    """The value is the speed of a format over that of transformers' QuantizedCache at the same bits."""
    reason = obstacle(rival, setting, shape)
    if reason is not None:
        return not_measured(reason)
    return in_pairs(*_speeds(setting, shape, rival.side, in_format(kv_dtype)), "tok/s", None, rival.name)


def _speeds(setting: Setting, shape: Shape, theirs: Side, ours: Side) -> tuple[list[float], list[float]]:
    """Tokens per second of each walk."""
    walks = [_walk(setting, shape, theirs, ours) for _ in range(setting.repeats)]
    return [walk[0] for walk in walks], [walk[1] for walk in walks]


def _walk(setting: Setting, shape: Shape, *sides: Side) -> list[float]:
    """Tokens per second of each side, by its median step."""
    states = prompt_states(setting, shape.batch, shape.prompt)
    caches = [_filled(setting, side, states) for side in sides]
    tokens = random_ids(setting, shape.batch, shape.new)
    seconds: list[list[float]] = [[] for _ in sides]
    for step in range(shape.new):
        for number in in_turn(step, range(len(sides))):
            sides[number].switch(setting.model)
            elapsed = _step(setting, tokens[:, step : step + 1], caches[number])
            seconds[number] += [elapsed] if step >= WARM_UP else []
    return [shape.batch / statistics.median(elapsed) for elapsed in seconds]


def _filled(setting: Setting, side: Side, states: States) -> Any:
    side.switch(setting.model)
    cache = side.make_cache(setting.model)
    fill(cache, states)
    return cache


def _step(setting: Setting, ids: Tensor, cache: Any) -> float:
    setting.synchronize()
    start = time.perf_counter()
    forward(setting.model, ids, cache)
    setting.synchronize()
    return time.perf_counter() - start


int8, fp8_e4m3, k8v4, int4 = (partial(over_native, name) for name in ("int8", "fp8_e4m3", "k8v4", "int4"))
int8_hqq = partial(over_rival, "int8", HQQ_8)
int4_hqq = partial(over_rival, "int4", HQQ_4)
int4_quanto = partial(over_rival, "int4", QUANTO_4)
