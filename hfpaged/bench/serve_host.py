"""A server in a thread of this process, whose event loop says how long it was busy and how long it was stuck."""

from __future__ import annotations

import asyncio
import importlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hfpaged.serve import build_app
from hfpaged.serve.uvicorn_server import Config, Server

BEAT = 0.01  # seconds
PATIENCE = 60.0


class Pulse:
    """A task that wakes up every BEAT seconds: `longest` is the longest time between two of them, which the loop was
    blocked for at most, or waited for a core or for Python's lock. It takes some of `cpu_seconds` itself.
    """

    def __init__(self) -> None:
        self.longest, self._began, self._now = 0.0, 0.0, 0.0

    @property
    def cpu_seconds(self) -> float:
        """Of the loop's thread, since `restart`."""
        return self._now - self._began

    def restart(self) -> None:
        """What was before does not count."""
        self.longest, self._began = 0.0, self._now

    async def beat(self) -> None:
        """For ever."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT)
            after, self._now = time.perf_counter(), time.thread_time()
            self.longest = max(self.longest, after - before)
            before = after


@contextmanager
def hosting(batcher: Any) -> Iterator[tuple[str, Pulse]]:
    """Serve `batcher` on a free port of the loopback; its URL, and the pulse of the event loop."""
    pulse = Pulse()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = build_app(batcher)
        ready = threading.Event()
        server = Server(Config(app, app.state.service, log_config=None), app.state.service, ready.set)
        thread = threading.Thread(target=_serve, args=(server, listening, pulse), name="server", daemon=True)
        thread.start()
        _wait(ready, thread)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", pulse
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


def _serve(server: Server, listening: socket.socket, pulse: Pulse) -> None:
    async def main() -> None:
        beating = asyncio.ensure_future(pulse.beat())
        await server.serve(sockets=[listening])
        beating.cancel()

    loop = _new_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Of the kind that the server has where it is installed."""
    try:
        loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    return loop


def _wait(ready: threading.Event, thread: threading.Thread) -> None:
    """Until it is warm, as /ready tells clients: what is made once at the start is no block of requests' time."""
    end = time.monotonic() + PATIENCE
    while not ready.wait(0.05):
        if not thread.is_alive() or time.monotonic() > end:
            raise RuntimeError("the server did not start; its log says why")
