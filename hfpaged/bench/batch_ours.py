"""hfpaged's side: a ContinuousBatcher over a pool of a given size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

import hfpaged
from hfpaged.bench.batch_workload import Run, Workload, endless
from hfpaged.bench.setting import Setting
from hfpaged.engine.events import Event

BLOCK = 16


@contextmanager
def batcher_of(setting: Setting, pool: int, **options: Any) -> Iterator[Any]:
    """A batcher over a pool of `pool` tokens, closed afterwards; the model has its own attention again then."""
    hfpaged.unpatch(setting.model)
    with endless(setting.model):
        batcher = hfpaged.ContinuousBatcher(setting.model, block_size=BLOCK, num_blocks=-(-pool // BLOCK), **options)
        try:
            yield batcher
        finally:
            batcher.close()
            hfpaged.unpatch(setting.model)


def batched(
    setting: Setting, workload: Workload, pool: int, watch: Callable[[Event], None] | None = None, **options: Any
) -> Run:
    """All requests at once. Making the batcher and its pool is not on the clock. `watch` hears of all that happens."""
    with batcher_of(setting, pool, hooks=() if watch is None else (watch,), **options) as batcher:
        start = time.perf_counter()
        outputs = batcher.generate(workload.prompts, generation_config=greedy(workload))
        setting.synchronize()
        seconds = time.perf_counter() - start
    return Run([output.token_ids for output in outputs], seconds)


def greedy(workload: Workload) -> list[GenerationConfig]:
    """One config for each request."""
    return [GenerationConfig(do_sample=False, max_new_tokens=new) for new in workload.new]
