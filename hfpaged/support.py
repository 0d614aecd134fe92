"""`hfpaged support`: whether a model works with a PagedCache, how fast, and why, from its config alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path

from rich.console import Console
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from hfpaged import custom_code
from hfpaged.errors import HfpagedError, InvalidConfigError
from hfpaged.verdict import CORRECT, FAST, NO_CACHE, REFUSED, Verdict, examine

EXPLAINED = {
    FAST: "attention reads the blocks through our kernels",
    CORRECT: "the tokens are the same, some layers get their keys and values as dense views",
    REFUSED: "PagedCache raises UnsupportedModelError",
    NO_CACHE: "there are no keys and values to page; PagedCache raises UnsupportedModelError",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its options."""
    line = "whether a model works with PagedCache, how fast, and why"
    parser = subparsers.add_parser(
        "support", help=line, description=line + ". Needs its config only. Exit code 0: works, 1: refused, 2: no model."
    )
    parser.add_argument("model", help="hub id, folder, config.json, or a model type such as gemma3_text")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 1 if the model is refused. Raises InvalidConfigError where there is no such model."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config, source = find_config(args.model)
    try:
        verdict = examine(config)
    except HfpagedError:
        raise
    except Exception as error:  # what a constructor raises over numbers that do not fit can be anything
        raise InvalidConfigError(f"transformers cannot build a model of {source}: {_first_line(error)}") from error
    if args.json:
        print(json.dumps({"model": args.model, "config": source} | dataclasses.asdict(verdict), indent=2))
    else:
        _print(args.model, source, verdict)
    return 0 if verdict.works else 1


def find_config(model: str) -> tuple[PreTrainedConfig, str]:
    """The config that `model` names, and where it came from. Raises InvalidConfigError."""
    if not Path(model).exists() and model in CONFIG_MAPPING:
        return CONFIG_MAPPING[model](), f"the default config of model type {model}"
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False), model
    except ValueError as error:
        if custom_code.is_refused(error):
            raise InvalidConfigError(
                f"{model!r} brings code of its own{custom_code.files_of(model)}, and this tells of models of "
                "transformers alone; load it where you trust it: PagedCache(model) works, or says why not"
            ) from error
        raise _no_config(model, error) from error
    except Exception as error:  # from a file that is no JSON to a division by its zero
        raise _no_config(model, error) from error


def _no_config(model: str, error: Exception) -> InvalidConfigError:
    return InvalidConfigError(
        f"{model!r} is no folder or file with a config, no model type and no model that can be fetched: "
        f"{_first_line(error)}"
    )


def _print(model: str, source: str, verdict: Verdict) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"[bold]{model}[/bold]: [bold]{verdict.outcome}[/bold], {EXPLAINED[verdict.outcome]}", markup=True)
    out.print(f"  model      {verdict.model_class} ({source})", markup=False)
    kinds = "; ".join(f"{count} x {kind}" for kind, count in verdict.layers.items())
    out.print(f"  layers     {kinds or 'none'}", markup=False)
    if verdict.attention:
        out.print(f"  attention  {verdict.attention}", markup=False)
    for reason in verdict.reasons:
        out.print(f"  because    {reason}", markup=False)
    for note in verdict.notes:
        out.print(f"  note       {note}", markup=False)
    out.print(f"  remedy     {verdict.remedy}", markup=False)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
