"""One replica: a model with its pool and its batcher, and the application of hfpaged.serve around them, in one process
that Ray Serve starts. It is told of requests by calls, and listens on no port. Importing this loads no torch: those
who start replicas do it, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope

from hfpaged.replicas.answered import REPLICA, Answered
from hfpaged.replicas.recipe import Recipe
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.telemetry import providers
from hfpaged.telemetry.span_attributes import CAPTURE_CONTENT

if TYPE_CHECKING:
    from hfpaged.replicas.model_host import ModelHost

LOOK_SECONDS = 0.05


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
        async for messages in self._host.hosted.answer(scope, body):
            yield [_signed(message, self.name) for message in messages]

    async def answer_whole(self, scope: Scope, body: bytes, only: str | None = None) -> Answered | None:
        """The same at once, for requests that are sent to all replicas; `only` may name the one that is meant."""
        if only not in (None, self.name):
            return None
        parts = self._host.hosted.answer(scope, body)
        return Answered(self.name, [message async for messages in parts for message in messages])

    async def facts(self) -> dict[str, Any]:
        """What does not change: see ModelHost, and who it is."""
        return {**self._host.facts(), "replica": self.name, "node": self.node}

    async def row(self) -> dict[str, Any]:
        """Who it is and what it does now."""
        why_not = self._host.service.why_not_ready()
        load = (await asyncio.to_thread(self._host.load))._asdict()
        return {"replica": self.name, "node": self.node, "ready": why_not is None, **load}

    async def drain(self) -> None:
        """Returns when nobody is answered any more; those who take too long are told that the server stops."""
        await self._host.service.drain(lambda: self._is_hurried)

    async def hurry(self) -> None:
        """Those who are answered now have had their time."""
        self._is_hurried = True

    async def record_routing_stats(self) -> dict[str, Any]:
        """What hfpaged.replicas.router decides by."""
        return await asyncio.to_thread(self._host.routing_stats)

    async def check_health(self) -> None:
        """Ray Serve asks from time to time, and starts another replica in place of one that raises RuntimeError."""
        engine = self._host.service.engine
        if engine is None or not engine.is_healthy:
            raise RuntimeError("the engine makes no steps")

    async def record_autoscaling_stats(self) -> Mapping[str, float]:
        """What hfpaged.replicas.scaling decides by."""
        load = await asyncio.to_thread(self._host.load)
        return {name: float(value) for name, value in load._asdict().items()}

    async def __del__(self) -> None:
        """Ray Serve calls this at the end, when no request is left or their time is over."""
        if hasattr(self, "_host"):
            await self._host.hosted.stop()
            self._leaving.close()

    async def _open(self, recipe: Recipe) -> None:
        self._is_hurried = False
        os.environ.update(recipe.environment)
        if recipe.options.record_prompts:
            os.environ[CAPTURE_CONTENT] = "true"
        self._leaving.enter_context(logging_to_stderr(recipe.log_level, as_json=recipe.log_json))
        logging.getLogger("hfpaged.access").setLevel(logging.WARNING)  # the ingress tells of each request
        self._leaving.enter_context(providers.observed())
        self._host = await asyncio.to_thread(_host, recipe, self.name)
        self._leaving.callback(self._host.close)
        await self._host.hosted.start()
        while not self._host.service.is_warm:
            await asyncio.sleep(LOOK_SECONDS)


def _host(recipe: Recipe, name: str) -> ModelHost:
    from hfpaged.replicas.model_host import ModelHost  # torch, and all that is built on it

    return ModelHost(recipe, name)


def _signed(message: Message, name: str) -> Message:
    """With who it is from."""
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [*message["headers"], (REPLICA, name.encode())]}


def _own_names() -> tuple[str, str]:
    """Of this replica, and of its node."""
    import ray
    from ray import serve

    context = ray.get_runtime_context()
    return serve.get_replica_context().replica_id.unique_id, context.get_node_id()
