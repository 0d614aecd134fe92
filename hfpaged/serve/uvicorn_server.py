"""uvicorn as this server needs it: it ends by draining, reads no endless headers, and can drop a connection."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hfpaged.serve.event_stream import DROP
from hfpaged.serve.gate import too_many_headers
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.service import Service

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What clients have to end their connections when all of them are answered or were told that they will not be.
GRACE_SECONDS = 5
FAULT_SECONDS = 3  # in which requests hear of a fault that ends the server; some may wait for a step without an end
MOST_WAITING = 16  # requests that a client may send behind one that is not answered yet, and still be watched
KEEP_ALIVE_SECONDS = 75  # longer than the minute after which load balancers let go: they must be the first


class Config(uvicorn.Config):
    """Of the application that `service` serves."""

    def __init__(self, app: Any, service: Service, **rest: Any) -> None:
        super().__init__(
            app, http=Protocol, ws="none", lifespan="on", access_log=False, server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=GRACE_SECONDS, **rest,
        )  # fmt: skip
        self.max_head = service.options.max_header_bytes
        self.head_seconds = service.options.send_timeout


class Protocol(HttpToolsProtocol):
    """One connection. What is no body is bounded in bytes and in time, and a client who goes is always noticed."""

    config: Config
    _head_bytes = 0  # that came since the last of a body
    _is_in_head = True
    _too_slow: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None  # the request whose answer is made

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._answered is not None:  # which uvicorn forgets when another request has come behind it
            self._answered.disconnected = not self._answered.response_complete
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._is_in_head:
            self._start_clock()
            data = _without_upgrade(data)
        super().data_received(data)
        if self._head_bytes > self.config.max_head and not self.transport.is_closing():
            self._refuse(too_many_headers(self.config.max_head))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {DROP: {"abort": self.transport.abort}}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else it stands behind a body in chunks, where nothing is expected
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        self._stop_clock()
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        if 0 < len(self.pipeline) <= MOST_WAITING:  # uvicorn would read again, and see him go, after the answer only
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        self._stop_clock()
        if self._is_idle:  # it was answered before it had ended
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if not self._is_in_head:
            self._start_clock()

    @property
    def _is_idle(self) -> bool:
        """Whether all that came has been answered."""
        return self._answered is None or (self._answered.response_complete and not self.pipeline)

    def _start_clock(self) -> None:
        if self._too_slow is None:
            self._too_slow = self.loop.call_later(self.config.head_seconds, self._give_up)

    def _stop_clock(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    def _give_up(self) -> None:
        """What was to come has not; whoever waits for an answer meanwhile still gets it."""
        self._too_slow = None
        if self._is_idle:
            self.transport.abort()
        else:
            self._start_clock()

    def _refuse(self, error: ApiError) -> None:
        if not self._is_in_head or not self._is_idle:  # it would stand in the middle of an answer
            self.transport.abort()
            return
        answer = error.response()
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        self.transport.write(f"HTTP/1.1 {error.status} \r\n".encode() + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Java's client asks for HTTP/2 in each request, and the parser would take the body for that. A server may ignore
    the wish; a header of the same length that nobody knows stands in its place then.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nignored:", head) + end + rest


class Server(uvicorn.Server):
    """`on_ready` is called when the application is ready for requests. The first signal to stop lets requests end, the
    second one ends them at once; neither is anybody's error.
    """

    def __init__(self, config: Config, service: Service, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._is_hurried = False

    async def main_loop(self) -> None:
        """Until it is told to stop, and all clients have been answered. Connections are taken as long: who asks is told
        that this server stops, and /ready and /metrics tell how it ends.
        """
        announcing = asyncio.ensure_future(self._announce())
        try:
            await super().main_loop()
        finally:
            announcing.cancel()
        await self._service.drain(lambda: self._is_hurried)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._is_hurried = self.should_exit
        self.should_exit = self._service.is_draining = True

    def stop_for(self, reason: str) -> None:
        """Nothing can be computed any more, so that requests have nothing to wait for: those under way are told."""
        self.should_exit = self._service.is_draining = True
        threading.Timer(FAULT_SECONDS, self._hurry).start()

    def _hurry(self) -> None:
        self._is_hurried = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise them again at the end, and the process would not end with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _announce(self) -> None:
        while self._service.why_not_ready() is not None:
            await asyncio.sleep(0.02)
        self._on_ready()
