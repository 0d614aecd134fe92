"""Server-sent events to a client who may go at any moment, or read slowly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.json_text import json_bytes

logger = logging.getLogger("hfpaged")

DROP = "hfpaged.drop"  # an extension of ASGI: close the connection at once
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event, of JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(data) + b"\n\n"


class EventStream(Response):
    """Sends what `chunks` gives. `close` is called in any case when it is over: at the end, when the client has gone,
    when one chunk could not be sent for `send_timeout` seconds, and when `ends` returns, which gives the last event.
    `answering` is entered meanwhile.

    Nothing is buffered here: while the client does not read, `chunks` is not asked for more.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes], close: Callable[[], None], *, send_timeout: float,
        ends: Callable[[], Awaitable[ApiError]],
        answering: Callable[[], AbstractContextManager[None]] = nullcontext, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._chunks, self._close, self._ends, self._answering = chunks, close, ends, answering
        self._send_timeout = send_timeout
        self._pending_since: float | None = None
        self._has_begun = False
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answering():
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        ends = asyncio.ensure_future(self._ends())
        stuck, gone = asyncio.ensure_future(self._until_stuck()), asyncio.ensure_future(until_gone(receive))
        tasks: list[asyncio.Future[Any]] = [sending, ends, stuck, gone]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_done, is_gone = sending.done(), gone.done()
            last = ends.result() if ends.done() else None
        finally:
            self._close()
            await _end(*tasks)
            await self._chunks.aclose()
        if is_done or is_gone:
            return
        if last is None or not await self._tell(last, scope, receive, send):
            await drop(scope, receive)

    async def _tell(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> bool:
        """Why it ends before its end; whether that could be sent."""
        answer = self._send_last(send, event(error.body)) if self._has_begun else error.response()(scope, receive, send)
        _, pending = await asyncio.wait({asyncio.ensure_future(answer)}, timeout=self._send_timeout)
        await _end(*pending)
        return not pending

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send(send, start)
        self._has_begun = True
        async for chunk in self._chunks:
            await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send_last(send, b"")

    async def _send(self, send: Send, message: Message) -> None:
        self._pending_since = time.monotonic()
        await send(message)
        self._pending_since = None

    async def _send_last(self, send: Send, body: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": False})

    async def _until_stuck(self) -> None:
        """A look from time to time costs less than a timeout for each token."""
        while True:
            await asyncio.sleep(self._send_timeout / 4)
            since = self._pending_since
            if since is not None and time.monotonic() - since > self._send_timeout:
                return


async def drop(scope: Scope, receive: Receive) -> None:
    """Close a connection whose client does not read: what was sent and not read is thrown away where the server has a
    way to (ours has one), else closed when the client is done with it.
    """
    extension = scope.get("extensions", {}).get(DROP)
    logger.warning("a client left its answer unread for too long; its connection is closed")
    if extension is not None:
        extension["abort"]()
        await until_gone(receive)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has hung up; its request has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
