"""Row python: the part of a decode step that goes into the cache's own Python, kernels not counted.

             update, attention, mask, hooks     kernels
outer        |------------------------------------------|
inner                            |----------------------|
Python's     |-------------------|
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import hfpaged_kernels

import hfpaged
from hfpaged import patching
from hfpaged.bench.generation import Prefilled
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED
from hfpaged.bench.stopwatch import Stopwatch, WrapperCost
from hfpaged.bench.watch import StepClock
from hfpaged.cache import PagedCache

OUTER: tuple[tuple[Any, str], ...] = (
    (PagedCache, "update"),
    (patching, "paged_attention"),
    (patching, "paged_mask"),
    (patching, "_before_forward"),
    (patching._AfterForward, "__call__"),
)
KERNELS = ("copy_blocks", "decode", "gather", "prefill", "write_kv")
INNER: tuple[tuple[Any, str], ...] = tuple((hfpaged_kernels, name) for name in KERNELS)
WARM_UP = 4


class StepCosts(StepClock):
    """Step times, with Python's part of each."""

    def __init__(self, synchronize: Callable[[], None], outer: Stopwatch, inner: Stopwatch, cost: WrapperCost) -> None:
        super().__init__(synchronize)
        self._outer, self._inner, self._cost = outer, inner, cost
        self._python: list[float] = []
        self._added: list[float] = []

    def medians(self) -> tuple[float, float]:
        """(Python's seconds of a step, all of its seconds), both without what the wrappers add."""
        added = [end - start for start, end in zip(self._added, self._added[1:], strict=False)]
        python = [end - start for start, end in zip(self._python, self._python[1:], strict=False)]
        bare = [step - extra for step, extra in zip(self.seconds, added, strict=True)]
        return statistics.median(python), statistics.median(bare)

    def _stamp(self) -> None:
        super()._stamp()
        outer, inner, cost = self._outer, self._inner, self._cost
        wrapped_inside = outer.calls * cost.inside + inner.calls * (cost.total - cost.inside)
        self._python.append(outer.seconds - inner.seconds - wrapped_inside)
        self._added.append((outer.calls + inner.calls) * cost.total)


def measure(setting: Setting, shape: Shape) -> Measured:
    """The median step of one run for each repeat, and the median of these."""
    with instrumented(setting.model) as (outer, inner):
        start = Prefilled.of(setting, PAGED, random_ids(setting, shape.batch, shape.prompt))
        start.go_on(WARM_UP, StepClock(setting.synchronize))
        cost = WrapperCost.measured()
        runs = []
        for _ in range(setting.repeats):
            costs = StepCosts(setting.synchronize, outer, inner, cost)
            start.go_on(shape.new, costs)
            runs.append(costs.medians())
    python, step = (statistics.median(values) for values in zip(*runs, strict=True))
    note = f"{1e3 * python:.2f} of {1e3 * step:.1f} ms a step"
    return Measured(python / step, note=note, values=tuple(part / whole for part, whole in runs))


@contextmanager
def instrumented(model: Any) -> Iterator[tuple[Stopwatch, Stopwatch]]:
    """The stopwatches of the cache's functions and of the kernels that they call; all is undone afterwards."""
    outer, inner = Stopwatch(), Stopwatch()
    hfpaged.unpatch(model)
    try:
        with ExitStack() as stack:
            for watch, places in ((outer, OUTER), (inner, INNER)):
                for owner, name in places:
                    stack.enter_context(mock.patch.object(owner, name, watch.timed(getattr(owner, name))))
            hfpaged.patch(model)
            yield outer, inner
    finally:
        # Patching anew gives transformers' registry our bare functions again.
        hfpaged.patch(hfpaged.unpatch(model))
        hfpaged.unpatch(model)
