"""Rows static, generate-batch and prefix: generated tokens per second, all requests there at once.

The sides take turns, and the median run of each counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from hfpaged.bench.batch_continuous import continuous, obstacle
from hfpaged.bench.batch_ours import batched
from hfpaged.bench.batch_static import first_runs, static
from hfpaged.bench.batch_workload import Run, Workload, alike, mixed
from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import not_measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import in_turn

POOL = 32_768  # tokens, on both sides

Side = Callable[[], Run]


def over_static(setting: Setting, shape: Shape) -> Measured:
    """The value is the speed of the batcher over that of generate() in batches of the better size."""
    workload = mixed(setting, shape)
    warm_up(setting, workload)
    tried = first_runs(setting, shape)
    best = min(tried, key=lambda size: tried[size].seconds)
    again = chain([tried[best]], iter(partial(static, setting, workload, best), None))  # that run counts too
    theirs, ours = _in_turns(setting.repeats, partial(next, again), _ours(setting, workload))
    rows = [run.rows for run in tried.values()]
    others = ", ".join(f"of {size} {run.speed:.1f} tok/s" for size, run in tried.items() if size != best)
    return compared(theirs, ours, f"batches of {best}; {others}", rows)


def over_continuous(setting: Setting, shape: Shape) -> Measured:
    """The value is the speed of the batcher over that of transformers' own continuous batching."""
    return _over_continuous(setting, mixed(setting, shape))


def over_continuous_alike(setting: Setting, shape: Shape) -> Measured:
    """The same for prompts that begin alike."""
    return _over_continuous(setting, alike(setting, shape))


def warm_up(setting: Setting, workload: Workload) -> None:
    """All prompts and a few tokens on our side: its kernels are compiled on first use, once for a machine."""
    batched(setting, Workload(workload.prompts, [min(new, 2) for new in workload.new]), POOL)


def compared(theirs: Sequence[Run], ours: Sequence[Run], note: str, more: Sequence[object] = ()) -> Measured:
    """The ratio of the median speeds, and whether all runs gave the same tokens; `more` are rows of further runs."""
    rows = [*(run.rows for run in (*theirs, *ours)), *more]
    same = all(found == rows[0] for found in rows)
    return in_pairs([run.speed for run in theirs], [run.speed for run in ours], "tok/s", same, note)


def _over_continuous(setting: Setting, workload: Workload) -> Measured:
    reason = obstacle(setting)
    if reason is not None:
        return not_measured(reason)
    warm_up(setting, workload)
    theirs = partial(continuous, setting, workload, POOL)
    return compared(*_in_turns(setting.repeats, theirs, _ours(setting, workload)), f"pools of {POOL:,} tokens")


def _ours(setting: Setting, workload: Workload) -> Side:
    return partial(batched, setting, workload, POOL)


def _in_turns(repeats: int, theirs: Side, ours: Side) -> tuple[list[Run], list[Run]]:
    """`repeats` runs of each side; each is the first of a pair in its turn."""
    found: dict[Side, list[Run]] = {theirs: [], ours: []}
    for number in range(repeats):
        for side in in_turn(number, (theirs, ours)):
            found[side].append(side())
    return found[theirs], found[ours]
