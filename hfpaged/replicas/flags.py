"""The flags of `hfpaged serve` for replicas on Ray Serve, and what they mean together."""

from __future__ import annotations

import argparse
import os

from hfpaged.errors import InvalidConfigError
from hfpaged.replicas.settings import APP_NAME, ReplicaSettings
from hfpaged.serve import flag_types as types
from hfpaged.serve.flag_types import add_flag as _add


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them as a group of their own."""
    group = parser.add_argument_group("replicas, on Ray Serve (pip install 'hfpaged[ray]')")
    _add(group, "--replicas",
         "run so many replicas, each with the model and a pool of its own, behind one address; requests go where their "
         "prefix is known",
         "none: the model runs in this process, without Ray",
         type=types.count, metavar="N")  # fmt: skip
    _add(group, "--min-replicas",
         "with --max-replicas, the fewest that there are",
         "1: one replica answers at once",
         type=types.count, metavar="N")  # fmt: skip
    _add(group, "--max-replicas",
         "let their number follow queue and KV use, up to so many",
         "as --replicas: each one more takes a device of its own",
         type=types.count, metavar="N")  # fmt: skip
    _add(group, "--address",
         "of a Ray cluster that runs, of which this machine is a node: auto, or HOST:PORT of its head",
         "none: one is started on this machine, which only this machine can reach, and stopped at the end")  # fmt: skip
    _add(group, "--num-gpus-per-replica",
         "GPUs of Ray's account that each takes, parts of one too",
         "1 where the model runs on cuda, else 0",
         type=_amount, metavar="N")  # fmt: skip
    _add(group, "--num-cpus-per-replica",
         "CPUs of Ray's account that each takes, and threads that it computes with",
         "1 with a GPU or on a cluster; else this machine's, shared among all replicas",
         type=_amount, metavar="N")  # fmt: skip
    _add(group, "--app-name",
         "of the application on Ray Serve",
         f"{APP_NAME}: another one where a cluster serves several models",
         metavar="NAME")  # fmt: skip
    _add(group, "--route-prefix",
         "path below which it is reached",
         "/: clients' examples work unchanged",
         metavar="PATH")  # fmt: skip


def are_wanted(args: argparse.Namespace) -> bool:
    """Whether there are to be replicas. Raises InvalidConfigError for flags that mean nothing without them."""
    if args.replicas is not None or args.max_replicas is not None or args.address is not None:
        return True
    for name in ("min_replicas", "num_gpus_per_replica", "num_cpus_per_replica", "app_name", "route_prefix"):
        if getattr(args, name) is not None:
            raise InvalidConfigError(f"--{name.replace('_', '-')} is about replicas; give --replicas N too")
    return False


def settings_of(args: argparse.Namespace, has_cuda: bool) -> ReplicaSettings:
    """What the flags say, with their defaults; `has_cuda` says whether this machine has. Raises InvalidConfigError."""
    most = args.max_replicas or args.replicas or 1
    least = args.min_replicas or (args.replicas or most if args.max_replicas is None else 1)
    on_cuda = (args.device or ("cuda" if has_cuda else "cpu")).startswith("cuda")
    gpus = float(on_cuda) if args.num_gpus_per_replica is None else args.num_gpus_per_replica
    if on_cuda and not gpus:
        raise InvalidConfigError(
            "--num-gpus-per-replica 0 hides all GPUs from replicas whose model runs on cuda; give each 1 or a part of "
            "one, or use --device cpu"
        )
    return ReplicaSettings(
        num_replicas=args.replicas or least, min_replicas=least, max_replicas=most, address=args.address,
        num_gpus=gpus, num_cpus=args.num_cpus_per_replica or _cpus(most, alone=not gpus and args.address is None),
        app_name=args.app_name or APP_NAME, route_prefix=args.route_prefix or "/",
    )  # fmt: skip


def check_sizes(args: argparse.Namespace, settings: ReplicaSettings) -> None:
    """Raises InvalidConfigError where several replicas would each take most of one GPU."""
    if 0 < settings.num_gpus < 1 and args.kv_cache_memory is None:
        raise InvalidConfigError(
            f"with --num-gpus-per-replica {settings.num_gpus:g} replicas share a GPU, of which the first one would "
            "take what is left for all; say how much each pool gets: --kv-cache-memory BYTES"
        )


def _cpus(replicas: int, *, alone: bool) -> float:
    return float(max((os.cpu_count() or 1) // replicas, 1)) if alone else 1.0


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount; use a number such as 1 or 0.5")
    return value
