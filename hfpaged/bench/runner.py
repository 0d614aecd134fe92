"""All kinds of `hfpaged bench`: measures the chosen rows and says what came out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import hfpaged
from hfpaged import json_file
from hfpaged.bench import report, setting
from hfpaged.bench.catalog import Row, choose
from hfpaged.bench.result import Outcome, exit_code
from hfpaged.bench.setting import Setting
from hfpaged.conditions import cpu_threads, quiet_transformers
from hfpaged.errors import InvalidConfigError

REPEATS = 3
WIDTH = 150  # of the table where stdout is no terminal


def run(args: argparse.Namespace) -> int:
    """Print the table and a last line; 1 if tokens differ, 3 if a target is missed and that counts."""
    rows = choose(args.only, args.rows)
    _check(args)
    with cpu_threads(args.threads), quiet_transformers():
        model, tokenizer = setting.load(args.model or args.name, args.dtype, args.device)
        repeats = args.repeats or (1 if args.quick else REPEATS)
        subject = Setting(model, tokenizer, repeats, args.quick, args.against, args.rate)
        outcomes = measure(subject, rows)
        header = subject.header()
    code = exit_code(outcomes, args.strict)
    _print(header, outcomes, args.json)
    if args.json:
        json_file.write(args.json, report.as_json(header, outcomes, code))
    return code


def measure(subject: Setting, rows: Iterable[Row]) -> list[Outcome]:
    """The rows one after the other; the model has its own attention again afterwards."""
    try:
        with torch.inference_mode():
            return [measure_row(subject, row) for row in _shown(list(rows))]
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


def _check(args: argparse.Namespace) -> None:
    for name in ("repeats", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InvalidConfigError(f"--{name} {value} measures nothing; use 1 or more")
    if args.rate <= 0:
        raise InvalidConfigError(f"--rate {args.rate:g}: no request ever comes; use more than 0")
    if args.name is not None and args.model is not None:
        raise InvalidConfigError(f"{args.name!r} and --model {args.model!r} both name a model; give one")
    json_file.check_folder("--json", args.json)


def _print(header: dict[str, Any], outcomes: list[Outcome], json_path: str | None) -> None:
    file = json_file.for_people(json_path)
    console = Console(file=file)
    if not console.is_terminal:
        console = Console(file=file, width=WIDTH)
    for name, value in header.items():
        text = f"{value:,}" if name == "parameters" else str(value)
        console.print(f"{name:13} {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(report.table(outcomes))
    console.print(report.verdict(outcomes), markup=False, highlight=False, soft_wrap=True)


def _shown(rows: list[Row]) -> Iterator[Row]:
    """The same rows, with a bar on a terminal and one line for each elsewhere, both on stderr."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(rows))
        for index, row in enumerate(rows):
            progress.update(task, description=row.name, completed=index)
            if not console.is_terminal:
                print(f"hfpaged: {row.name} ({index + 1} of {len(rows)})", file=sys.stderr, flush=True)
            yield row
        progress.update(task, completed=len(rows))
