"""`hfpaged serve --tp`: one model over several processes, which torchrun starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from hfpaged.errors import InvalidConfigError

AS_STARTED = 0  # as many as torchrun has started


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flag and its other name."""
    group.add_argument(
        "--tp", "--tensor-parallel-size", dest="tensor_parallel_size", nargs="?", const=AS_STARTED, type=_count,
        metavar="N",
        help="split the model over the processes that torchrun starts, each with its part of the weights and its own "
        "heads in its pool: torchrun --nproc-per-node N -m hfpaged.serve MODEL --tp (default: none: the model runs in "
        "one process)",
    )  # fmt: skip


def size_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Over how many processes the model is split: 1 without the flag. Raises InvalidConfigError."""
    asked, started = args.tensor_parallel_size, _started(environ)
    if asked is None:
        if started > 1:
            raise InvalidConfigError(
                f"torchrun has started {started} processes, and without --tp each of them would be a server of its "
                "own; add --tp, or start one without torchrun"
            )
        return 1
    if asked == 1 and started == 1:
        return 1
    words = f"torchrun --nproc-per-node {asked or max(started, 2)} -m hfpaged.serve {args.model or ''}".rstrip()
    if started == 1:
        raise InvalidConfigError(
            f"--tp splits a model over several processes, which torchrun starts, and this is one; use {words} --tp"
        )
    if asked not in (AS_STARTED, started):
        raise InvalidConfigError(
            f"--tensor-parallel-size {asked}, and torchrun has started {started} processes; use {words} --tp"
        )
    if args.adapter:
        raise InvalidConfigError(
            "--tp with --adapter: which adapter acts would be chosen on rank 0 alone; merge it into the model, or use "
            "one process"
        )
    if args.device is not None:
        raise InvalidConfigError(
            f"--tp with --device {args.device}: each rank has the device of its number, or all of them the CPU where "
            "there is no other; leave --device out"
        )
    return started


def check_alone(num_ranks: int) -> None:
    """Raises InvalidConfigError for replicas that would be split."""
    if num_ranks > 1:
        raise InvalidConfigError(
            "--tp with --replicas: Ray starts replicas, torchrun starts ranks, and none of the two knows the other's; "
            "use one of them, or several servers with --tp behind a router"
        )


def _started(environ: Mapping[str, str]) -> int:
    """Processes of this job. Others than torchrun set a size alone."""
    sizes = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    return int(sizes[1]) if all(size.isdecimal() for size in sizes) else 1


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; put the model first: MODEL --tp [N]")
    return int(text)
