"""One model on several devices or machines, each with a pool of its own, behind one address: on Ray Serve.

    hfpaged serve MODEL --replicas 2                    on this machine
    hfpaged serve MODEL --replicas 2 --address auto     on a Ray cluster that is there already

An *ingress* takes the requests and has no model; it hands each to a *replica*, which loads the model and answers with
the application of hfpaged.serve. Importing this loads neither Ray nor torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.serve.options import ServeOptions

# Ray reads them when it is imported, or hands them to the processes that it starts.
_RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Its proxy is given up after three times 5 seconds; it begins when the replicas do, which load all the CPUs.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # By default its workers, all that serves among them, give way to whatever else the machine does: beside as many
    # programs as there are cores they get 3 % of one.
    "RAY_worker_niceness": "0",
}  # fmt: skip
# A cluster of our own is nobody else's: on Linux Ray's processes would listen to all machines around, and do what they
# are told. The name is from where Ray does so by itself.
_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def run(args: argparse.Namespace, options: ServeOptions, sizes: Mapping[str, Any]) -> int:
    """`hfpaged serve` with replicas, until SIGTERM or Ctrl-C; returns 0. Raises HfpagedError."""
    _check_folder(args.model)
    launch = _launch(alone=args.address is None)
    from hfpaged.replicas.flags import check_sizes, settings_of
    from hfpaged.replicas.recipe import Recipe

    settings = settings_of(args, has_cuda=args.device is None and _has_cuda())
    check_sizes(args, settings)
    recipe = Recipe(
        options=replace(options, salt_secret=options.salt_secret or os.urandom(32)), model=args.model, dtype=args.dtype,
        device=args.device, trust_remote_code=args.trust_remote_code, sizes=sizes,
        log_level=args.log_level, log_json=args.log_json,
        neighbours=settings.max_replicas, environment={OTLP_ENDPOINT: args.otlp_endpoint} if args.otlp_endpoint else {},
    )  # fmt: skip
    code: int = launch.run(recipe, settings, args.host, args.port, shows_keys=bool(args.api_key))
    return code


def _check_folder(model: str | None) -> None:
    """Replicas would find out, each of them three times. Hub ids never begin like these."""
    if model is not None and model.startswith((".", "~", os.sep)) and not os.path.isdir(model):
        raise InvalidConfigError(
            f"cannot load {model!r}: there is no such folder; give one, or the id of a hub's model"
        )


def _launch(*, alone: bool) -> Any:
    for name, value in (_RAY_VARIABLES | (_ON_LOOPBACK if alone else {})).items():
        os.environ.setdefault(name, value)
    try:
        return import_module("hfpaged.replicas.launch")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("ray", "fastapi", "starlette", "uvicorn"):
            raise
        raise InvalidConfigError(
            f"replicas need {error.name}, which is not here; pip install 'hfpaged[ray]'"
        ) from error


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
