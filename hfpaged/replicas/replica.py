"""One replica: a model with its pool and its batcher, and the application of hfpaged.serve around them, in one process
that Ray Serve starts. It is told of requests by calls, and listens on no port.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
from starlette.types import Message, Scope

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.engine.sizing import SHARE_ON_CPU
from hfpaged.replicas.hosting import Hosted
from hfpaged.replicas.load import load_of
from hfpaged.replicas.recipe import Recipe
from hfpaged.replicas.reporting import Reporter
from hfpaged.serve import start_report
from hfpaged.serve.adapters import load_adapters
from hfpaged.serve.app import build_app
from hfpaged.serve.launch import load_model
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.serve.service import Service
from hfpaged.telemetry import providers
from hfpaged.telemetry.span_attributes import CAPTURE_CONTENT

logger = logging.getLogger("hfpaged")

LOOK_SECONDS = 0.05
REPLICA = b"x-hfpaged-replica"  # of an answer: who gave it


class Answered(NamedTuple):
    """One replica's whole answer to a request that was sent to all of them."""

    replica: str
    messages: list[Message]


class Replica:
    """What Ray Serve calls in the process of a replica. `name` is Ray Serve's own for it."""

    async def __init__(self, recipe: Recipe) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Returns when requests can be taken: the model is loaded, and its first forwards have been made. Raises what
        loading raises.
        """
        self.name, self.node = _own_names()
        self._leaving = ExitStack()
        try:
            await self._open(recipe)
        except BaseException:
            self._leaving.close()
            raise

    async def answer(self, scope: Scope, body: bytes, **_: Any) -> AsyncIterator[list[Message]]:
        """The messages of the answer to one request. Other arguments are for the router."""
        async for messages in self._hosted.answer(scope, body):
            yield [_signed(message, self.name) for message in messages]

    async def answer_whole(self, scope: Scope, body: bytes, only: str | None = None) -> Answered | None:
        """The same at once, for requests that are sent to all replicas; `only` may name the one that is meant."""
        if only not in (None, self.name):
            return None
        return Answered(self.name, [message async for part in self._hosted.answer(scope, body) for message in part])

    async def facts(self) -> dict[str, Any]:
        """What does not change: sizes, and who it is."""
        told = start_report.figures(self._batcher, self._service.options, "")
        return {**told, "replica": self.name, "node": self.node, "max_body_bytes": self._service.max_body_bytes}

    async def row(self) -> dict[str, Any]:
        """Who it is and what it does now."""
        why_not = self._service.why_not_ready()
        load = (await asyncio.to_thread(load_of, self._batcher))._asdict()
        return {"replica": self.name, "node": self.node, "ready": why_not is None, **load}

    async def drain(self) -> None:
        """Returns when nobody is answered any more; those who take too long are told that the server stops."""
        await self._service.drain(lambda: self._is_hurried)

    async def hurry(self) -> None:
        """Those who are answered now have had their time."""
        self._is_hurried = True

    async def record_routing_stats(self) -> dict[str, Any]:
        """What hfpaged.replicas.router decides by."""
        return await asyncio.to_thread(self._reporter.stats)

    async def check_health(self) -> None:
        """Ray Serve asks from time to time, and starts another replica in place of one that raises RuntimeError."""
        engine = self._service.engine
        if engine is None or not engine.is_healthy:
            raise RuntimeError("the engine makes no steps")

    async def record_autoscaling_stats(self) -> Mapping[str, float]:
        """What hfpaged.replicas.scaling decides by."""
        return {
            name: float(value) for name, value in (await asyncio.to_thread(load_of, self._batcher))._asdict().items()
        }

    async def __del__(self) -> None:
        """Ray Serve calls this at the end, when no request is left or their time is over."""
        if hasattr(self, "_hosted"):
            await self._hosted.stop()
            self._leaving.close()

    async def _open(self, recipe: Recipe) -> None:
        self._is_hurried = False
        os.environ.update(recipe.environment)
        if recipe.options.record_prompts:
            os.environ[CAPTURE_CONTENT] = "true"
        self._leaving.enter_context(logging_to_stderr(recipe.log_level, as_json=recipe.log_json))
        logging.getLogger("hfpaged.access").setLevel(logging.WARNING)  # the ingress tells of each request
        self._leaving.enter_context(providers.observed())
        self._batcher: ContinuousBatcher = await asyncio.to_thread(_load, recipe)
        self._leaving.callback(self._batcher.close)
        assert recipe.options.salt_secret is not None
        most_queued = recipe.sizes.get("max_num_queued_requests")
        self._reporter = Reporter(self._batcher, recipe.options.salt_secret, most_queued)
        app = build_app(self._batcher, _own_options(recipe, self.name))
        self._service: Service = app.state.service
        self._hosted = Hosted(app, lambda: app.router.lifespan_context(app))
        await self._hosted.start()
        while not self._service.is_warm:
            await asyncio.sleep(LOOK_SECONDS)


def _signed(message: Message, name: str) -> Message:
    """With who it is from."""
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [*message["headers"], (REPLICA, name.encode())]}


def _own_options(recipe: Recipe, name: str) -> Any:
    """No two processes write into one file."""
    record = recipe.options.record
    return recipe.options if record is None else replace(recipe.options, record=f"{record}.{name}")


def _load(recipe: Recipe) -> ContinuousBatcher:
    model, tokenizer = load_model(recipe.model, recipe.dtype, recipe.device, trust_remote_code=recipe.trust_remote_code)
    model = load_adapters(model, recipe.options.adapters)
    return ContinuousBatcher(model, tokenizer, **_sizes(recipe, next(model.parameters()).device.type))


def _sizes(recipe: Recipe, device: str) -> dict[str, Any]:
    """A machine's memory is shared by all replicas on it, each of which would take half of it for itself: together they
    take half of what is free now that the weights are there.
    """
    sizes = dict(recipe.sizes)
    if device == "cpu" and recipe.neighbours > 1 and sizes.get("memory") is None and "num_blocks" not in sizes:
        sizes["memory"] = int(SHARE_ON_CPU * psutil.virtual_memory().available / recipe.neighbours)
    return sizes


def _own_names() -> tuple[str, str]:
    """Of this replica, and of its node."""
    import ray
    from ray import serve

    context = ray.get_runtime_context()
    return serve.get_replica_context().replica_id.unique_id, context.get_node_id()
