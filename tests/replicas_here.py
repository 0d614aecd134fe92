"""Replicas and their ingress in one process, without Ray."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import AsyncExitStack, contextmanager

import uvicorn
from waiting import PATIENCE, wait_until

from hfpaged.replicas.answered import Answered
from hfpaged.replicas.hosting import Hosted
from hfpaged.replicas.ingress import Door, ingress_app
from hfpaged.replicas.load import load_of
from hfpaged.serve import ServeOptions, build_app
from hfpaged.serve.app import paths


class Replicas:
    """As ReplicaCalls, in this process: the replicas are asked in turn."""

    def __init__(self, apps):
        self.hosted = {f"r{number}": Hosted(app, None) for number, app in enumerate(apps)}
        self.asked, self.hashes = [], []

    async def ask(self, scope, body, prefix_hashes):
        name = list(self.hosted)[len(self.asked) % len(self.hosted)]
        self.asked.append(name)
        self.hashes.append(prefix_hashes)
        async for messages in self.hosted[name].answer(scope, body):
            yield messages

    async def ask_all(self, scope, body, only=None, **_):
        found = []
        for name in [each for each in self.hosted if only in (None, each)]:
            messages = [message async for part in self.hosted[name].answer(scope, body) for message in part]
            found.append(Answered(name, messages))
        return found

    async def rows(self):
        return [
            {"replica": name, "node": "here", "ready": True, **load_of(hosted._app.state.service.batcher)._asdict()}
            for name, hosted in self.hosted.items()
        ]


class Hashing:
    async def of(self, scope, path, body):
        return f"{path} {len(body)}".encode()


@contextmanager
def served_ingress(batchers):
    """The URL of an ingress before replicas with these batchers, and its calls of them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calls = Replicas([build_app(batcher) for batcher in batchers])
        server = uvicorn.Server(uvicorn.Config(_ingress(calls), lifespan="off", log_level="warning"))
        thread = threading.Thread(target=asyncio.run, args=(_serve(calls, server, listening),), daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        try:
            assert server.started, "it did not start; what its thread raised says why"
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", calls
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive()


def _ingress(calls):
    service = next(iter(calls.hosted.values()))._app.state.service
    return ingress_app(calls, Door(ServeOptions(), service.max_body_bytes), Hashing(), paths())


async def _serve(calls, server, listening):
    async with AsyncExitStack() as stack:
        for hosted in calls.hosted.values():
            await stack.enter_async_context(hosted._app.router.lifespan_context(hosted._app))
        await server.serve(sockets=[listening])
