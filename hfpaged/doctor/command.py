"""Runs `hfpaged doctor`."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from hfpaged.doctor.examination import examine
from hfpaged.doctor.findings import Diagnosis
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.report import as_json, show
from hfpaged.doctor.sources import is_url, scrape, scrape_twice
from hfpaged.errors import InvalidConfigError

WIDTH = 100  # where stdout is no terminal
LONGEST = 7 * 86400.0  # seconds that anybody waits


def run(args: argparse.Namespace) -> int:
    """Print what is found of each model; 1 if there is a problem. Raises MetricsError, InvalidConfigError."""
    _check(args)
    diagnoses = [examine(reading) for reading in _readings(args)]
    code = 1 if any(diagnosis.problems for diagnosis in diagnoses) else 0
    if args.json:
        print(json.dumps(as_json(args.source, args.interval, diagnoses, code), indent=2, allow_nan=False))
    else:
        _print(diagnoses)
    return code


def _readings(args: argparse.Namespace) -> list[Reading]:
    if args.interval is None:
        exposition = scrape(args.source, args.timeout)
        names = [args.model_name] if args.model_name is not None else exposition.model_names
        return [Reading.of(exposition, name) for name in names]
    first, last, seconds = scrape_twice(args.source, args.interval, args.timeout)
    names = [args.model_name] if args.model_name is not None else last.model_names
    old = {name: Reading.of(first, name) for name in first.model_names}
    new = [Reading.of(last, name) for name in names]
    return [
        reading.since(old[reading.model_name], seconds) if reading.model_name in old else reading for reading in new
    ]


def _check(args: argparse.Namespace) -> None:
    if args.interval is not None and not 0 < args.interval <= LONGEST:
        raise InvalidConfigError(f"--interval {args.interval:g} is no time to wait; use seconds, such as 60")
    if not 0 < args.timeout <= LONGEST:
        raise InvalidConfigError(f"--timeout {args.timeout:g} waits for no answer; use seconds, such as 10")
    if args.interval is not None and not is_url(args.source):
        raise InvalidConfigError(
            f"--interval reads twice, and {args.source} stays as it is; give a URL, or leave it out"
        )


def _print(diagnoses: list[Diagnosis]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for diagnosis in diagnoses:
        show(console, diagnosis)
