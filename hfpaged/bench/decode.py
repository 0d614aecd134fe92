"""Rows decode-*: tokens per second after a prefill that is not timed."""

from __future__ import annotations

import statistics

from hfpaged.bench.generation import Prefilled, Rows
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN, SIDES
from hfpaged.bench.turns import in_pairs
from hfpaged.bench.watch import StepClock
from hfpaged.measure import in_turn

WARM_UP = 4  # tokens: the kernels compile here


def measure(setting: Setting, shape: Shape) -> Measured:
    """Both sides go on from the same prompt in turns; a run's speed is that of its median step."""
    prompt = random_ids(setting, shape.batch, shape.prompt)
    prefilled = {side.name: Prefilled.of(setting, side, prompt) for side in SIDES}
    for start in prefilled.values():
        _run(setting, start, WARM_UP)
    speeds: dict[str, list[float]] = {name: [] for name in prefilled}
    found: list[Rows] = []
    for number in range(setting.repeats):
        for side in in_turn(number, SIDES):
            steps, rows = _run(setting, prefilled[side.name], shape.new)
            speeds[side.name].append(shape.batch / statistics.median(steps))
            found.append(rows)
    same = all(rows == found[0] for rows in found)
    return in_pairs(speeds[PLAIN.name], speeds[PAGED.name], "tok/s", same)


def _run(setting: Setting, start: Prefilled, new: int) -> tuple[list[float], Rows]:
    clock = StepClock(setting.synchronize)
    rows = start.go_on(new, clock)
    return clock.seconds, rows
