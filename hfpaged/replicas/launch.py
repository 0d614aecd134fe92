"""From the flags to replicas that serve, and to their end."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from rich.console import Console

from hfpaged.errors import InvalidConfigError
from hfpaged.replicas import cluster
from hfpaged.replicas.deployment import REPLICA, application
from hfpaged.replicas.ending import Ending, delete
from hfpaged.replicas.recipe import Recipe
from hfpaged.replicas.settings import ReplicaSettings
from hfpaged.replicas.worker_lines import as_json_lines
from hfpaged.serve import start_report
from hfpaged.serve.listening import listening_on
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.serve.telling import progress, tell_ready, url_of, warn_if_open

logger = logging.getLogger("hfpaged")

# What a replica's constructor raised: the last such line of the traceback that Ray Serve keeps.
_RAISED = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)


def run(recipe: Recipe, settings: ReplicaSettings, host: str, port: int, *, shows_keys: bool = False) -> int:
    """Serve with replicas until SIGTERM or Ctrl-C; returns 0. `shows_keys`: API keys stand on the command line.

    Raises InvalidConfigError for an address or a cluster that cannot be had, and for replicas that do not start, and
    LostApplicationError where somebody else ends them.
    """
    console = Console(highlight=False)
    words = "starting Ray" if settings.address is None else f"joining the Ray cluster at {settings.address}"
    with (
        logging_to_stderr(recipe.log_level, as_json=recipe.log_json),
        as_json_lines(wanted=recipe.log_json),
        Ending() as ending,
    ):
        if settings.address is None:
            with listening_on(host, port) as free:
                host, port = free.getsockname()[:2]
        with progress(words, console, recipe.log_json):
            if shows_keys and settings.address is not None:
                logger.warning(
                    "Ray keeps the command line of each program of a cluster, and its dashboard shows it: give API "
                    "keys by --api-key-file or HFPAGED_API_KEY instead of --api-key"
                )
            joined = cluster.join(settings)
            ending.take_signals()
        with joined:
            cluster.check_name(settings)
            proxy = cluster.listen(host, port)
            try:
                with progress(f"loading {settings.num_replicas} replicas", console, recipe.log_json):
                    handle = _deploy(recipe, settings)
                _report(recipe, settings, proxy, handle, console)
                ending.wait(settings.app_name, handle, recipe.options.shutdown_timeout)
            finally:
                with suppress(RayError, RayServeException):  # the cluster is gone, and the application with it
                    delete(settings.app_name)
        logger.info("stopped: no request is left")
    return 0


def _deploy(recipe: Recipe, settings: ReplicaSettings) -> Any:
    """Returns when all replicas are ready, with Ray Serve's handle of them. Raises InvalidConfigError."""
    try:
        serve.run(application(recipe, settings), name=settings.app_name, route_prefix=settings.route_prefix)
    except RuntimeError as error:
        raise InvalidConfigError(f"the replicas do not start: {_reason(settings.app_name) or error}") from error
    return serve.get_deployment_handle(REPLICA, app_name=settings.app_name)


def _reason(app_name: str) -> str:
    """What the last replica raised as it started."""
    told = serve.status().applications.get(app_name)
    messages = [] if told is None else [each.message for each in told.deployments.values()]
    raised = [match for message in messages for match in _RAISED.finditer(message)]
    return raised[-1][2] if raised else ""


def _report(recipe: Recipe, settings: ReplicaSettings, proxy: cluster.Proxy, replicas: Any, console: Console) -> None:
    url = url_of(proxy.host, proxy.port) + settings.route_prefix.rstrip("/")
    told = {**replicas.facts.remote().result(), "url": url, "replicas": _count(settings)}
    if recipe.log_json:
        start_report.log(told)
    else:
        start_report.show(told, console)
    warn_if_open(recipe.options, proxy.host, url)
    if not proxy.is_ours:
        logger.warning("Ray Serve runs in this cluster already, and listens on %s: --host and --port change nothing",
                       url_of(proxy.host, proxy.port))  # fmt: skip
    tell_ready(url, console, recipe.log_json)


def _count(settings: ReplicaSettings) -> str:
    if settings.is_autoscaled:
        return f"{settings.num_replicas}, and {settings.min_replicas} to {settings.max_replicas} as the load asks for"
    return f"{settings.num_replicas}"
