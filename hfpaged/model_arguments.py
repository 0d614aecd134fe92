"""The arguments by which bench, stress and quality are told of a model, and what is checked before it is loaded."""

from __future__ import annotations

import argparse

from hfpaged import json_file
from hfpaged.errors import InvalidConfigError
from hfpaged.picture import check_png

TRUST = (
    "run the code that the model or its tokenizer brings in files of its own",
    "off: it runs with all rights of this process, so read it first",
)
DTYPES = ("float32", "bfloat16", "float16")


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, --model, and how it is run."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--device", default="cpu", help="where torch runs the model (default: cpu)")
    add_trust(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as torch chooses)")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """--trust-remote-code"""
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help=f"{TRUST[0]} (default: {TRUST[1]})",
    )  # fmt: skip


def check_model_and_files(args: argparse.Namespace, *others: str) -> None:
    """One model at most is named, and the files of --json, --plot and `others` can be written. Raises
    InvalidConfigError.
    """
    if args.name is not None and args.model is not None:
        raise InvalidConfigError(f"{args.name!r} and --model {args.model!r} both name a model; give one")
    for name in ("json", "plot", *others):
        json_file.check_folder(f"--{name}", getattr(args, name))
    if args.plot:
        check_png(f"--plot {args.plot}", args.plot)
