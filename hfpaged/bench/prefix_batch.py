"""Rows prefill-batch, memory and decode: one batch of prompts that begin alike, run once for all three."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import lru_cache, partial

from hfpaged.bench.generation import Rows, generate
from hfpaged.bench.positions import counted, still_computed
from hfpaged.bench.prefix_prompts import prompts_of
from hfpaged.bench.random_prompts import left_padded
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN, SIDES, Side
from hfpaged.bench.turns import in_pairs
from hfpaged.bench.watch import Peak, StepClock, Together
from hfpaged.measure import in_turn


@dataclass(frozen=True)
class BatchRun:
    """What one side did: positions of the prefill, seconds to the first token, KV bytes, seconds of each step."""

    positions: int
    first: float
    peak: int
    steps: list[float]
    rows: Rows


def prefill(setting: Setting, shape: Shape) -> Measured:
    """The value is the part of the positions that hfpaged still computes."""
    plain, paged = _runs(setting, shape)
    return still_computed(
        plain,
        paged,
        f"first token after {paged.first:.1f} s, transformers {plain.first:.1f} s",
    )


def memory(setting: Setting, shape: Shape) -> Measured:
    """The value is what hfpaged takes from the machine at most, as a part of what transformers takes."""
    plain, paged = _runs(setting, shape)
    return Measured(
        value=paged.peak / plain.peak,
        plain=plain.peak / 1e6,
        paged=paged.peak / 1e6,
        unit="MB",
        same_tokens=plain.rows == paged.rows,
    )


def decode(setting: Setting, shape: Shape) -> Measured:
    """The value is the ratio of speeds; a run's speed is that of its median step."""
    plain, paged = zip(*(_runs(setting, shape, number) for number in range(setting.repeats)), strict=True)
    slow, fast = ([shape.batch / statistics.median(run.steps) for run in runs] for runs in (plain, paged))
    return in_pairs(slow, fast, "tok/s", all(run.rows == plain[0].rows for run in (*plain, *paged)))


@lru_cache(maxsize=8)
def _runs(setting: Setting, shape: Shape, number: int = 0) -> tuple[BatchRun, BatchRun]:
    """Turn `number`: plain transformers, and hfpaged. The former computes each of the long prompts, which takes
    minutes: three rows share the first turn, and what is counted in it is the same in all.
    """
    prompts = prompts_of(setting, shape)
    found = {side.name: _run(setting, side, prompts, shape.new) for side in in_turn(number, SIDES)}
    return found[PLAIN.name], found[PAGED.name]


def _run(setting: Setting, side: Side, prompts: Rows, new: int) -> BatchRun:
    ids, mask = left_padded(prompts, setting.device)
    side.switch(setting.model)
    cache = side.make_cache(setting.model)
    clock, peak = StepClock(setting.synchronize), Peak(partial(side.kv_bytes, cache))
    with counted(setting.model) as positions:
        start = time.perf_counter()
        watch = Together(clock, positions, peak)
        rows = generate(setting.model, ids, cache, new, mask=mask, watch=watch, min_new_tokens=new)
    return BatchRun(positions.count, clock.first - start, peak.largest, clock.seconds, rows)
