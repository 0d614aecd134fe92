"""`hfpaged bench`: speed and KV memory against plain transformers. Each kind of benchmark is a subcommand."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hfpaged.bench.kinds import KINDS, Kind
from hfpaged.bench.options import add_comparing, add_measuring, add_server

EXAMPLES = """\
examples:
  hfpaged bench generate --quick                          does it run, and are the tokens the same?
  hfpaged bench generate --model ./my-model --device cuda --dtype bfloat16
  hfpaged bench generate --only decode-long,beam-memory --json figures.json --plot figures.png
  hfpaged bench prefix                                    what is it worth that prompts begin alike?
  hfpaged bench quant --only int8-decode,int8-hqq         what does a quantized KV cache cost or gain in speed?
  hfpaged bench batch --only static --threads 2           32 requests at once, against batches of fixed size
  hfpaged bench batch --against http://localhost:9000     the same requests to another server that you have started, too
  hfpaged bench serve --only http,loop --threads 2        what does HTTP cost?
  hfpaged bench generate --compare figures.json           has anything become slower since then?
  hfpaged bench compare old.json new.json --tolerance 3   the same of two files, without measuring

exit codes: 0, 1 when tokens differ, 2 for what cannot be measured or compared, 3 with --strict when a target is missed,
4 when a row has regressed against --compare, 130 when interrupted (the rows that were done are shown)
"""

COMPARE = "two files of --json, an old one and a new one: which rows have become better or regressed"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its kinds."""
    line = "measure speed and KV memory against plain transformers"
    parser = subparsers.add_parser("bench", help=line, **_with_examples(line))
    parser.set_defaults(parser=parser)
    kinds = parser.add_subparsers(metavar="KIND", dest="kind")
    for kind in KINDS:
        _add_kind(kinds, kind)
    compare = kinds.add_parser("compare", help=COMPARE, **_with_examples(COMPARE))
    compare.add_argument("old", metavar="OLD.json")
    compare.add_argument("new", metavar="NEW.json")
    add_comparing(compare)


def run(args: argparse.Namespace) -> int:
    """Run the chosen kind; torch and transformers are not imported before, and not at all to compare two files."""
    if args.kind is None:
        args.parser.print_help(sys.stderr)
        return 2
    if args.kind == "compare":
        from hfpaged.bench import compare_command

        return compare_command.run(args)
    from hfpaged.bench import runner

    return runner.run(args)


def _add_kind(kinds: argparse._SubParsersAction[argparse.ArgumentParser], kind: Kind) -> None:
    width = max(13, *(len(row.name) for row in kind.rows))
    lines = "\n".join(f"  {row.name:{width}} {row.describe()}, {row.goal}" for row in kind.rows)
    parser = kinds.add_parser(kind.name, help=kind.line, **_with_examples(f"{kind.line}\n\nrows:\n{lines}"))
    parser.set_defaults(rows=kind.rows)
    add_measuring(parser)
    add_server(parser, kind)


def _with_examples(description: str) -> dict[str, Any]:
    return {
        "description": description, "epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter
    }  # fmt: skip
