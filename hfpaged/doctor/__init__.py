"""`hfpaged doctor`: reads the metrics of a process and says in sentences what is wrong and what to change."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpaged.doctor.diagnosing import diagnose
    from hfpaged.doctor.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]

_HOMES = {"Diagnosis": "findings", "Finding": "findings", "diagnose": "diagnosing"}

DESCRIPTION = """\
Reads the metrics of a process that runs hfpaged and says in sentences what is wrong, how it knows and what to change,
the most important first. Counters count since the process began, or with --interval from one reading to the next.
"""

EXAMPLES = """\
examples:
  hfpaged doctor http://localhost:9464                 since the process began
  hfpaged doctor localhost:9464 --interval 60          what happens in the next minute
  hfpaged doctor metrics.txt --model-name my-model     a scrape that was saved
  curl -s http://host:9464/metrics | hfpaged doctor -  from elsewhere

exit codes: 0 when no problem is found (there may be advice), 1 when one is, 2 when there is nothing to read
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "doctor", help="what is wrong with a running engine, by its metrics", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", metavar="URL|FILE|-", help="http://HOST:PORT, with or without /metrics, a file, or -")
    parser.add_argument(
        "--interval", type=float, metavar="SECONDS", help="read twice and judge the difference (URL only)"
    )
    parser.add_argument("--model-name", metavar="NAME", help="this model only (default: all, one after the other)")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for an answer (default: 10)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 1 if it has problems. Raises MetricsError, InvalidConfigError."""
    from hfpaged.doctor import command

    return command.run(args)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hfpaged.doctor' has no attribute {name!r}")
    return getattr(import_module(f"hfpaged.doctor.{_HOMES[name]}"), name)
