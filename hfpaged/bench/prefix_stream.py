"""Row prefill-stream: requests that begin alike, one after the other, on one pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import hfpaged
from hfpaged.bench.generation import Rows, generate
from hfpaged.bench.positions import counted, still_computed
from hfpaged.bench.prefix_prompts import prompts_of
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED, PLAIN, Side


@dataclass
class Served:
    """What one side has done by now. `make_cache` gives each request a cache of its own."""

    side: Side
    make_cache: Callable[[], Any]
    positions: int = 0
    seconds: float = 0.0
    rows: Rows = field(default_factory=list)

    def serve(self, setting: Setting, prompt: list[int], new: int) -> None:
        self.side.switch(setting.model)
        cache = self.make_cache()
        ids = torch.tensor([prompt], device=setting.device)
        with counted(setting.model) as positions:
            start = time.perf_counter()
            self.rows += generate(setting.model, ids, cache, new, watch=positions, min_new_tokens=new)
        self.seconds += time.perf_counter() - start
        self.positions += positions.count


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the part of the positions that hfpaged still computes; the sides take turns."""
    model = setting.model
    pool = hfpaged.PagedCache(model).pool
    plain = Served(PLAIN, lambda: PLAIN.make_cache(model))
    paged = Served(PAGED, lambda: hfpaged.PagedCache(model, pool=pool))
    for prompt in prompts_of(setting, shape):
        for served in (plain, paged):
            served.serve(setting, prompt, shape.new)
    return still_computed(
        plain,
        paged,
        f"{shape.new} tokens for each in {paged.seconds:.1f} s, transformers {plain.seconds:.1f} s",
    )
