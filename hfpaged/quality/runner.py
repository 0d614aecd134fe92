"""Runs `hfpaged quality`: measures each length, judges, and says what came out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console
from transformers import PreTrainedModel

import hfpaged
from hfpaged import demo_model, json_file
from hfpaged.conditions import cpu_threads, quiet_transformers
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_scales import LARGEST, KVScales
from hfpaged.model_arguments import check_model_and_files
from hfpaged.quality import report, thresholds_of
from hfpaged.quality.calibration import calibrate
from hfpaged.quality.contexts import (
    DEFAULT_CONTEXTS,
    QUICK_CONTEXTS,
    QUICK_TEXTS,
    TEXTS,
    Context,
    fit_all,
    parse_contexts,
)
from hfpaged.quality.corpus import Corpus, load_corpus
from hfpaged.quality.examination import examine, rank
from hfpaged.quality.plot import draw
from hfpaged.quality.progress import progress
from hfpaged.quality.report import Report
from hfpaged.quality.sides import NATIVE, Side, parse_sides
from hfpaged.quality.subject import Subject
from hfpaged.quality.thresholds import Thresholds
from hfpaged.quality.verdict import judge

JUDGED, CALIBRATED = "int8", "fp8_e4m3"  # without --kv
WIDTH = 190  # of the table where stdout is no terminal


def run(args: argparse.Namespace) -> int:
    """Print the tables and the verdict; 3 if a format is not fit. Raises InvalidConfigError, DemoModelError."""
    _check(args)
    thresholds = thresholds_of(args)
    contexts = parse_contexts(args.contexts or (QUICK_CONTEXTS if args.quick else DEFAULT_CONTEXTS))
    sides = [] if args.calibrate else parse_sides(args.kv or JUDGED, args.against, _scales(args.kv_scales))
    with cpu_threads(args.threads), quiet_transformers():
        model, tokenizer = demo_model.load(
            _model_name(args), args.dtype, args.device, trust_remote_code=args.trust_remote_code
        )
        corpus = load_corpus(args.data, tokenizer)
        try:
            with torch.inference_mode():
                return _run(args, model, corpus, contexts, sides, thresholds)
        finally:
            hfpaged.unpatch(model)


def _run(
    args: argparse.Namespace, model: PreTrainedModel, corpus: Corpus, contexts: list[Context], sides: list[Side],
    thresholds: Thresholds,
) -> int:  # fmt: skip
    texts = args.texts or (QUICK_TEXTS if args.quick else TEXTS)
    subject = Subject.of(model, corpus, texts, [NATIVE, *sides])
    contexts = fit_all(contexts, subject.positions, corpus.available)
    if args.calibrate:
        return _calibrate(args.calibrate, subject, contexts, args.kv or CALIBRATED)
    found = _judge(args, subject, contexts, sides, thresholds)
    _print(found, contexts, subject, args.json)
    if args.json:
        json_file.write(args.json, found.as_json())
    if args.plot:
        draw(args.plot, [one.figures for one in found.judged])
    return found.exit_code


def _judge(
    args: argparse.Namespace, subject: Subject, contexts: list[Context], sides: list[Side], thresholds: Thresholds
) -> Report:
    is_demo = _model_name(args) is None
    with progress() as begin:
        figures = [one for context in contexts for one in examine(subject, context, sides, begin)]
        ranking = rank(subject, contexts[0], sides[0], begin) if args.layers else {}
    judged = [judge(one, thresholds, is_demo) for one in figures]
    return Report(subject.header(), thresholds, judged, **ranking)


def _calibrate(path: str, subject: Subject, contexts: list[Context], kv_format: str) -> int:
    """Read the texts natively and write static scales."""
    batches = [batch for context in contexts for batch in subject.batches(subject.texts(context), caches=2)]
    found = calibrate(subject.model, batches, kv_format)
    try:
        size = found.save(path)
    except OSError as error:
        raise InvalidConfigError(f"--calibrate {path}: {error.strerror}; give a file that can be written") from error
    tokens = sum(batch.numel() for batch in batches)
    print(
        f"Wrote {path} ({size:,} bytes): the largest keys and values of each head in {len(found.layers)} layers over "
        f"{tokens:,} tokens, static scales of {found.kv_format} for this model alone."
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("texts", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InvalidConfigError(f"--{name} {value} measures nothing; use 1 or more")
    if args.calibrate and (args.kv or CALIBRATED) not in LARGEST:
        raise InvalidConfigError(f"--calibrate: {args.kv} has no static scales; use --kv {' or '.join(LARGEST)}")
    check_model_and_files(args, "calibrate")


def _scales(path: str | None) -> KVScales | None:
    try:
        return None if path is None else KVScales.load(path)
    except OSError as error:
        raise InvalidConfigError(f"--kv-scales {path}: {error.strerror}; give a file of --calibrate") from error


def _model_name(args: argparse.Namespace) -> str | None:
    name: str | None = args.model if args.name is None else args.name
    return name


def _print(found: Report, contexts: Sequence[Context], subject: Subject, json_path: str | None) -> None:
    file = json_file.for_people(json_path)
    console = Console(file=file)
    if not console.is_terminal:
        console = Console(file=file, width=WIDTH)
    for name, value in found.header.items():
        text = f"{value:,}" if name == "parameters" else str(value)
        console.print(f"{name:13} {text}", markup=False, highlight=False, soft_wrap=True)
    texts = {context.name: len(subject.texts(context)) for context in contexts}
    for line in report.notes(contexts, texts):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(report.table(found.judged))
    for line in report.residual_notes(found.judged):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.layers:
        console.print(report.layer_table(found.layers))
        console.print(report.head_table(found.heads))
        line = f"To keep the worst layers native: kv_dtype={found.exempting}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(found.last_line, markup=False, highlight=False, soft_wrap=True)
