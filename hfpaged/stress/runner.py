"""Runs `hfpaged stress`: loads, stresses, judges, and says what came out."""

from __future__ import annotations

import argparse
from typing import Any

from transformers import PreTrainedModel

import hfpaged
from hfpaged import compat, json_file
from hfpaged.bench import setting
from hfpaged.bench.batch_workload import endless
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.setting import Setting
from hfpaged.bench.showing import console_for, say
from hfpaged.conditions import cpu_threads, quiet_transformers
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.errors import InvalidConfigError
from hfpaged.layer_groups import group_layers
from hfpaged.model_arguments import check_model_and_files
from hfpaged.pageable import windows_of
from hfpaged.stress import SECONDS, plot, report
from hfpaged.stress.facts import Facts
from hfpaged.stress.mix import Room
from hfpaged.stress.progress import progress
from hfpaged.stress.subject import Plan, Stress
from hfpaged.stress.verdict import Finding, judge

TOKENS_EACH = 128  # of the pool for each sequence, where no size is given
ALPHABET = 4096  # different tokens that prompts are made of
STEP_TOKENS = 1024


def run(args: argparse.Namespace) -> int:
    """Print the figures and the verdict; exit codes are those of the help.

    Raises InvalidConfigError, DemoModelError.
    """
    _check(args)
    with cpu_threads(args.threads), quiet_transformers():
        model, tokenizer = setting.load(
            args.model or args.name, args.dtype, args.device, trust_remote_code=args.trust_remote_code
        )
        try:
            with endless(model):
                return _run(args, model, Setting(model, tokenizer, 1, is_quick=False))
        finally:
            hfpaged.unpatch(model)


def _run(args: argparse.Namespace, model: PreTrainedModel, subject: Setting) -> int:
    plan = Plan(_seconds(args), args.seed, args.context, args.length, args.kv_dtype, args.block_size)
    header = subject.header()
    header = {name: header[name] for name in header if name not in ("repeats", "quick")}
    stopped = False
    with _batcher(args, model) as batcher, progress(plan.seconds) as tell:
        header |= _described(args, batcher, plan)
        stress = Stress(model, batcher, random_ids(subject, 1, ALPHABET)[0].tolist(), plan, tell)
        try:
            stress.run()
        except KeyboardInterrupt:
            stopped = True
        facts = stress.facts()
    findings = judge(facts)
    code = 130 if stopped else 1 if findings else 0
    _tell(args, header, facts, findings, stopped, code)
    return code


def _batcher(args: argparse.Namespace, model: PreTrainedModel) -> ContinuousBatcher:
    num_blocks = args.num_blocks
    if args.memory is None and num_blocks is None:
        num_blocks = args.max_num_seqs * Room(0, args.block_size, _windows(model)).blocks(TOKENS_EACH)
    return ContinuousBatcher(
        model, memory=args.memory, num_blocks=num_blocks, block_size=args.block_size, kv_dtype=args.kv_dtype,
        max_num_seqs=args.max_num_seqs, max_num_batched_tokens=max(STEP_TOKENS, args.max_num_seqs),
        debug=args.debug,
    )  # fmt: skip


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Of each layer group."""
    groups = group_layers(windows_of(model.config, compat.default_layers(model.config)))
    return [group.window for group in groups]


def _described(args: argparse.Namespace, batcher: ContinuousBatcher, plan: Plan) -> dict[str, Any]:
    told = batcher.describe()
    return {
        "kv_format": told["kv_format"], "num_blocks": told["num_blocks"], "block_size": told["block_size"],
        "pool_bytes": told["pool_bytes"], "max_num_seqs": args.max_num_seqs, "planned": plan.seconds,
        "seed": plan.seed, "debug": args.debug,
    }  # fmt: skip


def _seconds(args: argparse.Namespace) -> float:
    return float(args.minutes * 60 if args.minutes is not None else SECONDS if args.seconds is None else args.seconds)


def _check(args: argparse.Namespace) -> None:
    for name in ("threads", "max_num_seqs", "context", "length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InvalidConfigError(f"--{name.replace('_', '-')} {value} stresses nothing; use 1 or more")
    if not _seconds(args) > 0:
        raise InvalidConfigError(f"{_seconds(args):g} seconds stress nothing; use more than 0")
    check_model_and_files(args)


def _tell(
    args: argparse.Namespace, header: dict[str, Any], facts: Facts, findings: list[Finding], stopped: bool, code: int
) -> None:
    console = console_for(args.json)
    for name, value in header.items():
        counts = name in ("parameters", "num_blocks", "pool_bytes")
        say(console, f"{name:13} {f'{value:,}' if counts else value}")
    console.print(report.table(facts, findings))
    for finding in findings:
        say(console, f"{finding.name}: {finding.text}")
        for suspect in finding.suspects:
            say(console, f"  {suspect}")
    if args.plot:
        plot.draw(args.plot, facts, f"{header['model']}, {header['kv_format']}")
    if args.json:
        json_file.write(args.json, report.as_json(header, facts, findings, stopped, code))
    say(console, report.last_line(facts, findings, stopped))
