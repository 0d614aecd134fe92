"""Rows decode-*: tokens per second after a prefill that is not timed."""

from __future__ import annotations

import statistics

from hfpaged.bench.generation import Prefilled, Rows
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN, SIDES
from hfpaged.bench.watch import StepClock

WARM_UP = 4  # tokens: the kernels compile here


def measure(setting: Setting, shape: Shape) -> Measured:
    """Both sides go on from the same prompt in turns; the value is the ratio of their median steps."""
    prompt = random_ids(setting, shape.batch, shape.prompt)
    prefilled = {side.name: Prefilled.of(setting, side, prompt) for side in SIDES}
    for start in prefilled.values():
        _run(setting, start, WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in prefilled}
    rows: dict[str, Rows] = {}
    for _ in range(setting.repeats):
        for name, start in prefilled.items():
            steps, rows[name] = _run(setting, start, shape.new)
            seconds[name] += steps
    speed = {name: shape.batch / statistics.median(steps) for name, steps in seconds.items()}
    return Measured(
        value=speed[PAGED.name] / speed[PLAIN.name],
        plain=speed[PLAIN.name],
        paged=speed[PAGED.name],
        unit="tok/s",
        same_tokens=rows[PLAIN.name] == rows[PAGED.name],
    )


def _run(setting: Setting, start: Prefilled, new: int) -> tuple[list[float], Rows]:
    clock = StepClock(setting.synchronize)
    rows = start.go_on(new, clock)
    return clock.seconds, rows
