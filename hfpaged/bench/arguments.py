"""What bench, stress and quality check of their arguments before a model is loaded."""

from __future__ import annotations

import argparse

from hfpaged import json_file
from hfpaged.errors import InvalidConfigError
from hfpaged.picture import check_png


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
