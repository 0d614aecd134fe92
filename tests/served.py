"""A server for tests, as `hfpaged serve` makes it, but in a thread; at the end nothing is left of any request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from waiting import PATIENCE, wait_until

from hfpaged import ContinuousBatcher
from hfpaged.serve import ServeOptions, build_app
from hfpaged.serve.service import Service
from hfpaged.serve.uvicorn_server import Config, Server


@dataclass(frozen=True)
class Served:
    url: str
    client: httpx.Client
    service: Service
    uvicorn: Server

    @property
    def batcher(self) -> ContinuousBatcher:
        return self.service.batcher

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Until `holds` says something true."""
        wait_until(holds)

    def wait_until_idle(self) -> None:
        """Until no request is there, of those who have hung up neither."""
        wait_until(lambda: not self.batcher.loop.requests and not self.batcher.has_work)


@contextmanager
def served(
    batcher: ContinuousBatcher, options: ServeOptions | None = None, *, headers: dict[str, str] | None = None,
    port: int = 0, send_buffer: int | None = None,
) -> Iterator[Served]:  # fmt: skip
    """Serve a batcher while inside; `headers` go with each request of the client, `port` is a free one by default, and
    the system keeps `send_buffer` bytes for each of its connections. On leaving no request is left, all blocks are
    back, and the pool is whole. The batcher stays open.
    """
    app = build_app(batcher, options)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections may not be gone yet
        listening.bind(("127.0.0.1", port))
        if send_buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        config = Config(app, app.state.service, log_level="warning")
        is_ready = threading.Event()
        server = Server(config, app.state.service, is_ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server", daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            wait_until(lambda: is_ready.is_set() or not thread.is_alive())
            assert is_ready.is_set(), "the server did not start; its log says why"
            with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
                found = Served(url, client, app.state.service, server)
                yield found
                found.wait_until_idle()
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive(), "the server did not stop"
    assert_nothing_left(batcher)


def assert_nothing_left(batcher: ContinuousBatcher) -> None:
    """No request, all blocks free or evictable, and the pool's own accounts agree."""
    assert not batcher.loop.requests
    assert not batcher.requests_with_blocks()
    assert batcher.pool.num_free == batcher.pool.num_blocks
    batcher.pool.check_integrity()
