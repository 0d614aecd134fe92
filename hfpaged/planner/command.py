"""`hfpaged plan`: what fits on a card, what is short, and the cheapest ways out, from a config alone."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

from hfpaged.errors import InvalidConfigError
from hfpaged.planner import replay_command, sweep_command
from hfpaged.planner.flags import add_flags

if TYPE_CHECKING:
    from hfpaged.planner.fit import Fit
    from hfpaged.planner.ways_out import WayOut

LINE = "what fits on a card, what is short, and the cheapest ways out, from a config alone"

DESCRIPTION = """\
What fits on a card, what is short, and the cheapest ways out, from the config of a model alone: nothing is loaded.
With MODEL alone it plans for the GPU of this machine, or for its memory, and says how many requests fit.
"""

EPILOG = """\
examples:
  hfpaged plan ./my-model                                        on this machine
  hfpaged plan org/model --device h100 --context 32768 --concurrency 16
  hfpaged plan config.json --device 80GB --prompt 512 --output 1024 --concurrency 64
  hfpaged plan ./my-model --device a100-80gb --kv-dtype int8 --tp 2 --json
  hfpaged plan ./my-model --device l4 --replicas 4 -n 64 --swap-space 16GiB
  $(hfpaged plan ./my-model --for serve)                         start a server so
  hfpaged plan ./my-model --replay trace.jsonl --over pool=2GiB,4GiB --over kv-dtype=auto,int8
  hfpaged plan ./my-model --sweep plan.html --replay trace.jsonl

exit codes: 0 when it fits, 1 when it does not, 2 when the model or a flag cannot be understood.
With --for serve: 0 when a line was printed (with the cheapest way out that `hfpaged serve` has flags for where it does
not fit as asked; stderr says so), 1 when there is none. Paths with spaces need eval "$(hfpaged plan ... --for serve)".
With --replay: 0, and 130 when Ctrl-C came before its end; what was found until then is printed.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "plan", help=LINE, description=DESCRIPTION, epilog=EPILOG, usage="hfpaged plan MODEL [--FLAG VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a folder, its config.json, or a hub id")
    add_flags(parser)
    replay_command.add_flags(parser.add_argument_group("replay"))
    sweep_command.add_flags(parser.add_argument_group("sweep"))


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 where it does not fit. Raises InvalidConfigError."""
    from hfpaged.planner.fit import fit
    from hfpaged.planner.question import case_of
    from hfpaged.planner.ways_out import ways_out

    _check(args)
    found = fit(case_of(args))
    if args.sweep is not None:
        return sweep_command.run(args, found)
    if args.replay is not None:
        return replay_command.run(args, found)
    ways = ways_out(found)
    if args.target == "serve":
        return _for_serve(args.model, found, ways)
    code = 0 if found.fits else 1
    if args.json:
        from hfpaged.planner.record import as_json

        print(json.dumps(as_json(found, ways, code), indent=2, allow_nan=False))
    else:
        from hfpaged.planner.report import show

        show(found, ways)
    return code


def _check(args: argparse.Namespace) -> None:
    """Raises InvalidConfigError for flags that would be passed over."""
    if args.target is not None and args.replay is not None:
        raise InvalidConfigError(f"--replay tries many plans, and --for {args.target} writes one; use one of the two")
    if args.replay is None and (args.over or args.cost is not None or args.requests is not None):
        raise InvalidConfigError("--over, --cost and --requests are those of a replay; add --replay TRACE")


def _for_serve(model: str, found: Fit, ways: list[WayOut]) -> int:
    """Print the line, and on stderr why; 1 where no flags of `hfpaged serve` help."""
    from hfpaged.planner.serve_line import check_servable, recommended, seats_remark, serve_words
    from hfpaged.planner.words import remarks, verdict

    check_servable(found)
    best = recommended(found, ways)
    print(f"hfpaged: {verdict(found)}", file=sys.stderr)
    if best is None:
        print("hfpaged: no flags of `hfpaged serve` help; see hfpaged plan without --for", file=sys.stderr)
        return 1
    for way in ways:
        if way.fit is best:
            print(f"hfpaged: recommended with {way.title} ({way.costs})", file=sys.stderr)
    for remark in [*remarks(best), *seats_remark(best)]:
        print(f"hfpaged: note: {remark}", file=sys.stderr)
    print(shlex.join(serve_words(best, model)))
    return 0
