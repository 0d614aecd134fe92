"""`hfpaged plan MODEL --replay TRACE`: a trace on the real scheduler and pool, over the sizes one may choose."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from hfpaged.serve import flag_types as types

if TYPE_CHECKING:
    from hfpaged.planner.fit import Fit
    from hfpaged.planner.replay_report import Report


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Declare those of a replay."""
    from hfpaged.planner.replay_grid import over

    add = group.add_argument
    add("--replay", metavar="TRACE",
        help="run the real scheduler and pool on a trace: of `hfpaged serve --record` or in Mooncake's format, .gz "
             "too, - for stdin (JSON lines with arrival, lengths and hashes)")  # fmt: skip
    add("--over", type=over, action="append", default=[], metavar="NAME=A,B",
        help="values to try, in all combinations: pool=2GiB,4GiB kv-dtype=auto,int8 block-size=8,16,32 "
             "window=none,4096 max-num-seqs=64,128 token-budget=2048,4096 replicas=1,2,4 router=prefix,in-turn; may "
             "come several times")  # fmt: skip
    add("--cost", metavar="COST",
        help="seconds of a step: a=0.01,b=2e-5,c=1e-4,d=1e-8 (a step, a prompt token, a sequence that decodes, a "
             "stored token read), or a file with these or with measured steps (default: fitted from the steps in the "
             "trace, else assumed from the device)")  # fmt: skip
    add("--requests", type=types.count, metavar="N", help="replay the first N requests only (default: all)")
    add(
        "--knee",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look for the rate of requests at which the queue takes off, on the first 5000 (default: yes)",
    )
    add("--jobs", type=types.count, default=os.cpu_count() or 1, metavar="N",
        help="replays at the same time, each in a process of its own (default: one for each core)")  # fmt: skip


def run(args: argparse.Namespace, found: Fit) -> int:
    """Print what was found; 130 where Ctrl-C came before the end. Raises InvalidConfigError, TraceError."""
    report = _replayed(args, found)
    if args.json:
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        from hfpaged.planner.replay_table import show

        show(report)
    return 130 if report.was_interrupted else 0


def _replayed(args: argparse.Namespace, found: Fit) -> Report:
    from hfpaged.planner.cost_source import known_cost
    from hfpaged.planner.knee import FINER, RATES, REFUSED, REQUESTS, find_knee
    from hfpaged.planner.replay_grid import recorded_variant, variants_of
    from hfpaged.planner.replay_report import Report, best_of, sample
    from hfpaged.planner.replay_runs import Runs, progress
    from hfpaged.planner.trace_reading import read
    from hfpaged.planner.words import no_tiers, replayed_ranks

    variants = variants_of(found, args.over)  # before a long trace is read: what cannot be is said at once
    trace = read(args.replay)
    if args.requests is not None:
        trace = sample(trace, args.requests)
    cost = known_cost(args.cost, trace, found)
    recorded = recorded_variant(trace)
    count, few = len(trace.requests), sample(trace, REQUESTS)
    total = count * (len(variants) + (recorded is not None))
    knee_total = len(few.requests) * (len(RATES) + len(FINER)) if args.knee else 0
    with progress(total + knee_total) as told:
        runs = Runs(trace, cost.cost, args.jobs, told)
        outcomes = runs.run([*variants, *filter(None, [recorded])])
        if not outcomes:
            raise KeyboardInterrupt
        own, knee = outcomes[: len(variants)], None
        if args.knee and not runs.was_interrupted:
            runs.told = lambda done: told(total + done)
            best = best_of(own)
            if few.seconds and best.too_long <= REFUSED * best.requests:  # else there is no rate, or no queue
                rate = len(few.requests) / few.seconds
                knee = find_knee(best.variant, rate, lambda tried: runs.run(tried, few))
    of_recording = outcomes[-1] if recorded is not None and len(outcomes) > len(variants) else None
    name = "stdin" if args.replay == "-" else os.path.basename(args.replay)
    if runs.was_interrupted:
        print("hfpaged: interrupted; this is what was found until then", file=sys.stderr)
    left_out = [*no_tiers(found), *replayed_ranks(found, measured=not cost.assumed)]
    return Report(
        found.case.sizes.facts.name, name, trace, cost, own, of_recording, knee, runs.was_interrupted, left_out
    )  # fmt: skip
