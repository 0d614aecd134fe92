"""`hfpaged bench compare OLD.json NEW.json`: measures nothing, and needs neither torch nor a model."""

from __future__ import annotations

import argparse

from hfpaged import json_file
from hfpaged.bench import comparison_report, figures_file
from hfpaged.bench.comparison import Comparison, compare
from hfpaged.bench.showing import console_for, say


def run(args: argparse.Namespace) -> int:
    """A table, a verdict, and an exit code."""
    json_file.check_folder("--json", args.json)
    found = compare(figures_file.read(args.old), figures_file.read(args.new), args.tolerance)
    show(found, args.json)
    verdict = comparison_report.sentence(found)
    say(console_for(args.json), verdict)
    if args.json:
        json_file.write(args.json, comparison_report.as_json(found))
    return found.exit_code


def show(found: Comparison, json_path: str | None) -> None:
    """The table, and below it what else is different."""
    console = console_for(json_path)
    console.print(comparison_report.table(found))
    for line in found.told:
        say(console, line)
