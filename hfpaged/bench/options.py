"""The options of `hfpaged bench`. Free of torch, so that help and errors are quick."""

from __future__ import annotations

import argparse

from hfpaged.bench.comparison import TOLERANCE
from hfpaged.bench.kinds import Kind
from hfpaged.bench.serve_rows import RATE
from hfpaged.model_arguments import add_model


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """What all kinds that measure have."""
    add_model(parser)
    parser.add_argument(
        "--repeats", type=int, metavar="N",
        help="turns of both sides: medians count, and the spread is told (default: 3, with --quick 1)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="ROW,...", help="measure these rows alone")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; nothing is judged")
    parser.add_argument("--strict", action="store_true", help="exit with 3 when a target is missed")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw the results (pip install 'hfpaged[plot]')")
    parser.add_argument(
        "--compare", metavar="OLD.json", help="say what has become better or worse since that file of --json"
    )
    add_comparing(parser)


def add_comparing(parser: argparse.ArgumentParser) -> None:
    """What a comparison takes, with or without measuring."""
    parser.add_argument(
        "--tolerance", type=_percent, default=TOLERANCE, metavar="PERCENT",
        help=f"what may become worse and is still the same (default: {100 * TOLERANCE:g} %%)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")


def add_server(parser: argparse.ArgumentParser, kind: Kind) -> None:
    """Another server, where it can have a part; and how many requests come to it."""
    parser.set_defaults(against=None, against_model=None, against_key=None, rate=RATE)
    if kind.takes_server:
        parser.add_argument(
            "--against", metavar="URL", help="an OpenAI-compatible server with the same model, to be compared by HTTP"
        )
        parser.add_argument("--against-model", metavar="NAME", help="what it calls the model (default: its first one)")
        parser.add_argument("--against-key", metavar="KEY", help="its API key (default: the variable OPENAI_API_KEY)")
    if any(row.takes_server for row in kind.rows):
        parser.add_argument(
            "--rate", type=float, default=RATE, metavar="N", help=f"requests per second of the load (default: {RATE:g})"
        )


def _percent(text: str) -> float:
    """A part of 1, of "5" or "5%"."""
    try:
        number = float(text.strip().removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage from 0 to 99; give one as 5 or 5%")
    return number / 100
