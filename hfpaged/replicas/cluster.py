"""Ray itself: started on this machine, or joined where it runs, and Ray Serve's HTTP proxy in it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from hfpaged.errors import HfpagedError, InvalidConfigError
from hfpaged.replicas.settings import ReplicaSettings

with warnings.catch_warnings():  # of what Ray will do some day
    warnings.simplefilter("ignore", FutureWarning)
    import ray
    from ray import serve
    from ray.exceptions import AuthenticationError
    from ray.serve.config import HTTPOptions, ProxyLocation

OBJECT_STORE_BYTES = 128 << 20  # nothing large goes through it: answers are sent as they are
CONTROLLER, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"  # Ray Serve's own names
QUIET_SERVE = {"enable_access_log": False, "log_level": "WARNING"}  # we tell of requests ourselves


class RayStartError(HfpagedError):
    """Ray's own processes are not there in time, or end at once."""


class Proxy(NamedTuple):
    """Where Ray Serve listens, and whether it was started for us."""

    host: str
    port: int
    is_ours: bool


def join(settings: ReplicaSettings) -> AbstractContextManager[None]:
    """Make this process one of a Ray cluster: of that at `settings.address`, else of one of its own. Who gets this
    leaves it, and with it the cluster of its own ends. Raises InvalidConfigError where there is none, or too little in
    it, and RayStartError.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if settings.address is None:
        _start(settings)
    else:
        _join(settings.address)
    return _joined()


@contextmanager
def _joined() -> Iterator[None]:
    try:
        yield
    finally:
        ray.shutdown()


def listen(host: str, port: int) -> Proxy:
    """Start Ray Serve where it does not run yet. Where it does, its proxy listens as it was told to."""
    running = _running_options()
    if running is not None:
        return Proxy(running.host, running.port, is_ours=False)
    serve.start(
        http_options=HTTPOptions(host=host, port=port), proxy_location=ProxyLocation.HeadOnly,
        logging_config=QUIET_SERVE,
    )  # fmt: skip
    return Proxy(host, port, is_ours=True)


def check_name(settings: ReplicaSettings) -> None:
    """Raises InvalidConfigError where the cluster serves an application of that name or at that path already."""
    for name, told in serve.status().applications.items():
        route = getattr(told, "route_prefix", None)
        if name == settings.app_name or route == settings.route_prefix:
            raise InvalidConfigError(
                f"the cluster serves an application {name!r} already{f', at {route}' if route else ''}; give "
                "--app-name and --route-prefix that it has not, or delete it"
            )


def _start(settings: ReplicaSettings) -> None:
    cpus = settings.max_replicas * settings.num_cpus
    try:
        ray.init(
            address="local",  # else Ray joins any cluster that it finds on this machine
            num_cpus=max(int(-(-cpus // 1)), os.cpu_count() or 1), include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES, logging_level=logging.ERROR,
        )  # fmt: skip
    except Exception as error:  # Ray has no kind of its own for a machine that is too busy
        raise RayStartError(
            f"Ray does not start on this machine: {_first_line(error)}; its processes have 30 s, so try again when the "
            "machine is less busy, or start Ray with `ray start --head` and give --address auto"
        ) from error
    there, asked = ray.cluster_resources().get("GPU", 0.0), settings.max_replicas * settings.num_gpus
    if asked > there:
        ray.shutdown()
        raise InvalidConfigError(
            f"{settings.max_replicas} replicas with {settings.num_gpus:g} GPUs each need {asked:g}, and this machine "
            f"has {there:g}; use fewer --replicas, a smaller --num-gpus-per-replica, or --device cpu"
        )


def _join(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.ERROR, namespace=None)
    except (ConnectionError, ValueError, RuntimeError, AuthenticationError) as error:
        raise InvalidConfigError(
            f"no Ray cluster lets us in at --address {address}: {_first_line(error)}; start one with "
            "`ray start --head`, set RAY_AUTH_MODE=token where it wants the token of ~/.ray/auth_token, or leave "
            "--address out"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _running_options() -> Any:
    """HTTPOptions of the Ray Serve that runs in the cluster, None where none does."""
    try:
        controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:  # there is no such actor
        return None
    return ray.get(controller.get_http_config.remote())
