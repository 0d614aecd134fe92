"""The rival that everybody has: model.generate() over batches of a fixed size, one after the other."""

from __future__ import annotations

import time
from functools import lru_cache

import hfpaged
from hfpaged.bench.batch_workload import Run, Workload, endless, mixed
from hfpaged.bench.generation import Rows, generate
from hfpaged.bench.random_prompts import left_padded
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PLAIN

SIZES = (8, 32)


def static(setting: Setting, workload: Workload, size: int) -> Run:
    """Batches of `size` in the order of the requests, padded on the left. Each runs to its longest answer; what a
    row was given beyond its own length counts for nothing.
    """
    hfpaged.unpatch(setting.model)
    rows: Rows = []
    with endless(setting.model):
        start = time.perf_counter()
        for first in range(0, len(workload.prompts), size):
            rows += _batch(setting, workload.part(first, size))
        setting.synchronize()
        return Run(rows, time.perf_counter() - start)


@lru_cache(maxsize=1)
def first_runs(setting: Setting, shape: Shape) -> dict[int, Run]:
    """One run of the mixed workload for each size of a batch. Minutes with a model of use, so that rows share it."""
    workload = mixed(setting, shape)
    return {size: static(setting, workload, size) for size in SIZES}


def _batch(setting: Setting, workload: Workload) -> Rows:
    ids, mask = left_padded(workload.prompts, setting.device)
    cache = PLAIN.make_cache(setting.model)
    rows = generate(setting.model, ids, cache, max(workload.new), mask=mask)
    return [row[:count] for row, count in zip(rows, workload.new, strict=True)]
