"""Row first-token: how long a request waits for its first token when the beginning of its prompt is known."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

import hfpaged
from hfpaged.bench.generation import Rows, generate
from hfpaged.bench.prefix_prompts import alike
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import in_turn

COLD, WARM = "cold", "warm"


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the wait for a warm prompt as a part of that for a cold one, on the side where that is shorter."""
    model = setting.model
    warm_up, *prompts = alike(setting, shape.prompt, [shape.own] * (setting.repeats + 1))
    pool = hfpaged.PagedCache(model).pool
    sides = {PLAIN.name: PLAIN, COLD: PAGED, WARM: PAGED}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[Rows]] = {name: [] for name in sides}
    for number, prompt in enumerate((warm_up, *prompts)):  # each is new in what it does not share
        for name, side in in_turn(number, list(sides.items())):
            side.switch(model)
            cache = hfpaged.PagedCache(model, pool=pool) if name == WARM else side.make_cache(model)
            elapsed, rows = _wait(setting, prompt, cache, shape.new)
            seconds[name].append(elapsed)
            tokens[name].append(rows)
    waits = {name: [1e3 * each for each in elapsed[1:]] for name, elapsed in seconds.items()}
    cold = min(waits[PLAIN.name], waits[COLD], key=statistics.median)
    return replace(
        in_pairs(
            cold, waits[WARM], "ms", tokens[PLAIN.name] == tokens[COLD] == tokens[WARM],
            note=f"cold with hfpaged {statistics.median(waits[COLD]):.1f} ms",
        ),
        plain=statistics.median(waits[PLAIN.name]), plain_runs=tuple(waits[PLAIN.name]),
    )  # fmt: skip


def _wait(setting: Setting, prompt: list[int], cache: Any, new: int) -> tuple[float, Rows]:
    ids = torch.tensor([prompt], device=setting.device)
    setting.synchronize()
    start = time.perf_counter()
    rows = generate(setting.model, ids, cache, new)
    return time.perf_counter() - start, rows
