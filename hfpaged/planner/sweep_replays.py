"""Replays beside a miss-ratio curve: what the real scheduler and pool find at a few sizes of it."""

from __future__ import annotations

from dataclasses import replace

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import USUAL_SEQUENCES
from hfpaged.planner.cost_source import known_cost
from hfpaged.planner.fit import Fit
from hfpaged.planner.replay_runs import Runs, progress
from hfpaged.planner.sweep_hits import own_sizes
from hfpaged.planner.trace import Trace
from hfpaged.planner.variant import Variant, variant_of

MOST = 2000  # requests, so that it takes no more than a minute; the curve itself takes all


def replayed(trace: Trace, found: Fit, cost: str | None, jobs: int) -> dict[int, float]:
    """Shares of the prompts' tokens that were found, by the bytes of the pool; none for a trace of more than MOST
    requests, and none of pools that are too small for one of them. Raises InvalidConfigError for a cost that cannot be
    read, and KeyboardInterrupt.
    """
    variants = _variants(found) if len(trace.requests) <= MOST else {}
    if not variants:
        return {}
    with progress(len(trace.requests) * len(variants)) as told:
        runs = Runs(trace, known_cost(cost, trace, found).cost, jobs, told)
        outcomes = runs.run(list(variants.values()))
    if runs.was_interrupted:
        raise KeyboardInterrupt
    return {size: outcome.hit_rate for size, outcome in zip(variants, outcomes, strict=True) if not outcome.too_long}


def _variants(found: Fit) -> dict[int, Variant]:
    """By their bytes: as the plan's own, but that nobody is refused."""
    most = found.asked or USUAL_SEQUENCES
    budget = max(found.case.choices.token_budget, most)
    variants = {}
    for size in own_sizes(found.pool)[1:4]:
        try:
            variant = variant_of(found.layout, size, most, max_num_batched_tokens=budget)
        except InvalidConfigError:  # half a pool may be too small for one request: nothing to compare there
            continue
        variants[size] = replace(variant, max_num_queued_requests=None)
    return variants
