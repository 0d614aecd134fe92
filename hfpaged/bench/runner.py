"""All kinds of `hfpaged bench`: measures the chosen rows and says what came out."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace

import torch

import hfpaged
from hfpaged import json_file
from hfpaged.bench import compare_command, comparison, endpoint, figures_file, plot, report, setting
from hfpaged.bench.catalog import Row, choose
from hfpaged.bench.conclusion import THIS_RUN, Conclusion
from hfpaged.bench.result import Outcome
from hfpaged.bench.setting import Setting
from hfpaged.bench.showing import console_for, say, shown
from hfpaged.conditions import cpu_threads, quiet_transformers
from hfpaged.errors import InvalidConfigError
from hfpaged.model_arguments import check_model_and_files

REPEATS = 3


def run(args: argparse.Namespace) -> int:
    """Print the table and a last line; exit codes are those of the help. Whatever stops it in the middle, the rows that
    are done are told and written first.
    """
    rows = choose(args.only, args.rows, has_server=args.against is not None)
    _check(args)
    old = None if args.compare is None else figures_file.read(args.compare)
    against = None
    if args.against is not None:
        against = endpoint.reach(args.against, args.against_key, args.against_model)
    with cpu_threads(args.threads), quiet_transformers():
        model, tokenizer = setting.load(
            args.model or args.name, args.dtype, args.device, trust_remote_code=args.trust_remote_code
        )
        repeats = args.repeats or (1 if args.quick else REPEATS)
        subject = Setting(model, tokenizer, repeats, args.quick, against, args.rate, args.trust_remote_code)
        header = {"kind": args.kind, **subject.header()}
        if any(row.takes_server for row in rows):
            header["rate"] = args.rate
        if old is not None:
            comparison.check(old, THIS_RUN, header, [row.name for row in rows])
        outcomes: list[Outcome] = []
        stop = _measure_until_stopped(subject, rows, outcomes)
    found = Conclusion(header, outcomes, len(rows), stop, args.strict, old, args.tolerance)
    _tell(found, args)
    if stop is not None and not isinstance(stop, KeyboardInterrupt):
        raise stop
    return found.exit_code


def measure(subject: Setting, rows: Iterable[Row], outcomes: list[Outcome]) -> None:
    """The rows one after the other, into `outcomes`; the model has its own attention again afterwards."""
    try:
        with torch.inference_mode():
            for row in shown(list(rows)):
                outcomes.append(measure_row(subject, row))
    finally:
        hfpaged.unpatch(subject.model)


def measure_row(subject: Setting, row: Row) -> Outcome:
    """One row, with prompts as long as the model allows."""
    wanted = row.shape.quick() if subject.is_quick else row.shape
    shape = wanted.fitted(subject.positions)
    measured = row.load()(subject, shape)
    if shape != wanted:
        cut = f"prompt cut from {wanted.prompt} to {shape.prompt} tokens, the model's most"
        measured = replace(measured, note="; ".join(filter(None, [measured.note, cut])))
    return Outcome(row, shape, measured, is_judged=not subject.is_quick)


def _measure_until_stopped(
    subject: Setting, rows: Iterable[Row], outcomes: list[Outcome]
) -> KeyboardInterrupt | Exception | None:
    """What has stopped it, once there is something to be told."""
    try:
        measure(subject, rows, outcomes)
    except (KeyboardInterrupt, Exception) as error:
        if not outcomes:
            raise
        return error
    return None


def _check(args: argparse.Namespace) -> None:
    for name in ("repeats", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InvalidConfigError(f"--{name} {value} measures nothing; use 1 or more")
    if not args.rate > 0:
        raise InvalidConfigError(f"--rate {args.rate:g}: no request ever comes; use more than 0")
    check_model_and_files(args)


def _tell(found: Conclusion, args: argparse.Namespace) -> None:
    """The table, the comparison, the files, and the verdict as the last line."""
    console = console_for(args.json)
    for name, value in found.header.items():
        say(console, f"{name:13} {f'{value:,}' if name == 'parameters' else value}")
    console.print(report.table(found.outcomes))
    if found.comparison is not None:
        compare_command.show(found.comparison, args.json)
    if args.plot:
        plot.draw(args.plot, found)
    if args.json:
        json_file.write(args.json, found.as_json())
    say(console, found.verdict)
