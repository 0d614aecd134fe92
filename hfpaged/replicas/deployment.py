"""The application on Ray Serve: an ingress and its replicas."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from hfpaged.replicas import scaling
from hfpaged.replicas.cluster import QUIET_SERVE
from hfpaged.replicas.ingress import Ingress
from hfpaged.replicas.recipe import Recipe
from hfpaged.replicas.replica import Replica
from hfpaged.replicas.routing_stats import STATS_SECONDS
from hfpaged.replicas.settings import ReplicaSettings

REPLICA, INGRESS = "Replica", "Ingress"
HEAD = {"node:__internal_head__": 0.001}  # what only the head node of a cluster has, which outlives the others
MOST_CALLS = 100_000  # a replica's own queue says when it is full, in words of ours
LAST_SECONDS = 10.0  # beyond the time that requests get to end
HEALTH_SECONDS = 5.0
MOST_STARTS = 3  # of replicas that fail as they load


def application(recipe: Recipe, settings: ReplicaSettings) -> Any:
    """For `serve.run`."""
    seconds = recipe.options.shutdown_timeout + LAST_SECONDS
    common = {
        "max_ongoing_requests": MOST_CALLS, "graceful_shutdown_timeout_s": seconds,
        "graceful_shutdown_wait_loop_s": 0.1, "health_check_period_s": HEALTH_SECONDS,
        "logging_config": QUIET_SERVE,
    }  # fmt: skip
    replica = serve.deployment(
        Replica, name=REPLICA, ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        max_constructor_retry_count=MOST_STARTS, request_router_config=_router(), **_number(settings), **common,
    )  # fmt: skip
    ingress = serve.deployment(
        serve.ingress()(Ingress), name=INGRESS, ray_actor_options={"num_cpus": 0, "resources": HEAD}, **common
    )
    return ingress.bind(replica.bind(recipe), recipe)


def _number(settings: ReplicaSettings) -> dict[str, Any]:
    if not settings.is_autoscaled:
        return {"num_replicas": settings.num_replicas}
    return {"autoscaling_config": AutoscalingConfig(
        min_replicas=settings.min_replicas, initial_replicas=settings.num_replicas, max_replicas=settings.max_replicas,
        look_back_period_s=scaling.LOOK_BACK_SECONDS, upscale_delay_s=scaling.UP_SECONDS,
        downscale_delay_s=scaling.DOWN_SECONDS,
        policy=AutoscalingPolicy(policy_function="hfpaged.replicas.scaling:policy"),
    )}  # fmt: skip


def _router() -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class="hfpaged.replicas.router.PrefixRouter", request_routing_stats_period_s=STATS_SECONDS
    )
