"""The ingress: takes requests from Ray Serve's HTTP proxy, lets the gate look at them as one process would, and hands
them to replicas. It has no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hfpaged.replicas.calls import ReplicaCalls, has_died, is_lost
from hfpaged.replicas.failover import Failover
from hfpaged.replicas.for_all import ForAll
from hfpaged.replicas.hashing import Hashing, load_tokenizer
from hfpaged.replicas.recipe import Recipe
from hfpaged.serve.callers import KeyRing
from hfpaged.serve.event_stream import until_gone
from hfpaged.serve.exchange import REQUEST_ID
from hfpaged.serve.gate import Gate, Guarded, path_of
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.serve.options import ServeOptions


class Ingress:
    """What Ray Serve makes the entrance of an application. `replicas` is its handle of the deployment of Replica."""

    async def __init__(self, replicas: Any, recipe: Recipe) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Returns when there is a replica."""
        self._logging = logging_to_stderr(recipe.log_level, as_json=recipe.log_json)
        self._logging.__enter__()
        self._calls = ReplicaCalls(replicas)
        # While replicas load their models.
        tokenizer, facts = await asyncio.gather(asyncio.to_thread(load_tokenizer, recipe), self._calls.facts())
        self._recipe, self._facts = recipe, facts
        self._hashing = Hashing(recipe, tokenizer, facts["block_size"])

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve asks for the application here."""
        door = Door(self._recipe.options, self._facts["max_body_bytes"])
        return ingress_app(self._calls, door, self._hashing, self._facts["paths"])


class Door:
    """What the gate goes by."""

    def __init__(self, options: ServeOptions, max_body_bytes: int) -> None:
        self.options, self._max_body_bytes = options, max_body_bytes
        self.keys = KeyRing(options.api_keys, options.salt_secret)

    @property
    def max_body_bytes(self) -> int:
        """As the replicas' models need it."""
        return self._max_body_bytes


class Entrance:
    """ASGI: the start and the end, and no name of a request in the headers of its answer: Ray's proxy puts it there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._app(scope, receive, lambda message: send(_without_name(message)))
        else:
            await send({"type": "websocket.close", "code": 1000})


class Handover:
    """ASGI, behind the gate: each request to one replica or to all."""

    def __init__(self, calls: ReplicaCalls, for_all: ForAll, hashing: Hashing) -> None:
        self._calls, self._for_all, self._hashing = calls, for_all, hashing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes = (await receive())["body"]
        answering = asyncio.ensure_future(self._answer(_named(scope), body, send))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            answering.cancel()
            gone.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        """Raises ApiError, and what a replica raises."""
        if self._for_all.is_for_all(scope):
            response = await self._for_all.answer(scope, body)
            await response(scope, _nothing, send)
            return
        hashes = await self._hashing.of(scope, path_of(scope), body)
        await Failover(lambda: self._calls.ask(scope, body, hashes), is_lost, has_died).answer(send)


def _named(scope: Scope) -> Scope:
    """With the name that the gate has given the request, so that a replica's log has it too."""
    name = (REQUEST_ID, scope["hfpaged.request_id"].encode())
    return {**scope, "headers": [*(pair for pair in scope["headers"] if pair[0] != REQUEST_ID), name]}


def _without_name(message: Message) -> Message:
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [pair for pair in message["headers"] if pair[0].lower() != REQUEST_ID]}


def ingress_app(calls: ReplicaCalls, door: Door, hashing: Hashing, paths: Iterable[str]) -> ASGIApp:
    """The ASGI application of an ingress; `paths` are those that replicas answer."""
    for_all = ForAll(calls)
    guarded = Guarded(Route(path, lambda _: None) for path in (*paths, *for_all.own_paths))
    return Entrance(Gate(Handover(calls, for_all, hashing), door, guarded))


async def _live(receive: Receive, send: Send) -> None:
    for step in ("startup", "shutdown"):
        while (await receive())["type"] != f"lifespan.{step}":
            pass
        await send({"type": f"lifespan.{step}.complete"})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
