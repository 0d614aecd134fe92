"""Row pool: how full the pool is before the first request has to give its blocks back."""

from __future__ import annotations

from hfpaged.bench.batch_ours import batched
from hfpaged.bench.batch_static import first_runs
from hfpaged.bench.batch_steps import Steps
from hfpaged.bench.batch_workload import mixed
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the largest share of blocks in use after any step before the first preemption; the pool holds
    half of what all requests need together, but always the longest.
    """
    workload = mixed(setting, shape)
    needs = [len(prompt) + new for prompt, new in zip(workload.prompts, workload.new, strict=True)]
    pool = max(sum(needs) // 2, max(needs))
    watch = Steps()
    run = batched(setting, workload, pool, watch)
    use = max((step.use for step in watch.steps[: watch.unhurried]), default=0.0)
    same = all(run.rows == plain.rows for plain in first_runs(setting, shape).values())
    return Measured(use, same_tokens=same, note=f"{pool:,} tokens; {watch.preemptions} preemptions later")
