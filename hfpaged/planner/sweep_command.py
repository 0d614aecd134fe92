"""`hfpaged plan MODEL --sweep [FILE]`: what fits by context and format; with a trace, hits by the size of the pool."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from hfpaged.errors import InvalidConfigError

if TYPE_CHECKING:
    from hfpaged.planner.fit import Fit
    from hfpaged.planner.sweep_hits import HitsByPool


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Declare those of a sweep."""
    group.add_argument(
        "--sweep", nargs="?", const="", metavar="FILE",
        help="how many requests fit by context and KV format, and with --replay TRACE, which prompts are found in the "
             "cache by the size of the pool; as a table, and drawn into FILE.png or FILE.html",
    )  # fmt: skip


def run(args: argparse.Namespace, found: Fit) -> int:
    """Print the sweep, and draw it. Raises InvalidConfigError, TraceError."""
    from hfpaged.planner.sweep import concurrency
    from hfpaged.planner.sweep_report import Sweep, show, write
    from hfpaged.planner.words import one_pool

    _check(args, found)
    hits, skipped = _hits(args, found) if args.replay is not None else (None, 0)
    machine, facts = found.case.machine, found.case.sizes.facts
    sweep = Sweep(facts.name, machine.name, found.pool, concurrency(found), hits, skipped, one_pool(found))
    if args.sweep:  # before anything is printed, as a reader may go away
        write(sweep, args.sweep)
    if args.json:
        print(json.dumps(sweep.as_json(), indent=2, allow_nan=False))
    else:
        show(sweep)
    if args.sweep:
        print(f"written to {args.sweep}", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace, found: Fit) -> None:
    """Before anything long is begun. Raises InvalidConfigError."""
    from hfpaged.config import format_bytes
    from hfpaged.planner.sweep_plot import check_file

    if args.sweep:
        check_file(args.sweep)
    if args.target:
        raise InvalidConfigError(f"--sweep shows many plans, and --for {args.target} writes one; use one of the two")
    if found.pool <= 0:
        raise InvalidConfigError(
            f"weights and activations leave no room for a pool on {found.case.machine.name} (short by "
            f"{format_bytes(-found.pool)}): there is nothing to sweep; give another --device, or the pool by "
            "--kv-cache-memory"
        )


def _hits(args: argparse.Namespace, found: Fit) -> tuple[HitsByPool, int]:
    """The curve of a trace, with replays beside it, and how many of its lines could not be read."""
    from hfpaged.planner.replay_report import sample
    from hfpaged.planner.replay_runs import progress
    from hfpaged.planner.sweep_hits import hits_by_pool
    from hfpaged.planner.sweep_replays import replayed
    from hfpaged.planner.trace_reading import read

    trace = read(args.replay)
    if args.requests is not None:
        trace = sample(trace, args.requests)
    with progress(len(trace.requests)) as told:
        hits = hits_by_pool(trace, found, told)
    return replace(hits, replayed=replayed(trace, found, args.cost, args.jobs)), trace.skipped.count
