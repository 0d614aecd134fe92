"""Server-sent events to a client who may go at any moment, or read slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hfpaged.serve.json_text import json_bytes

DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event, of JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(data) + b"\n\n"


class EventStream(Response):
    """Sends what `chunks` gives. `close` is called in any case when it is over: at the end, when the client has gone,
    when one chunk could not be sent for `send_timeout` seconds, or after `limit` seconds, of which `late` tells.

    Nothing is buffered here: while the client does not read, `chunks` is not asked for more.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes], close: Callable[[], None], *, send_timeout: float,
        limit: float | None = None, late: bytes = b"", headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._chunks, self._close = chunks, close
        self._send_timeout, self._limit, self._late = send_timeout, limit, late
        self._pending_since: float | None = None
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        others = [asyncio.ensure_future(until_gone(receive)), asyncio.ensure_future(self._until_stuck())]
        try:
            done, _ = await asyncio.wait({sending, *others}, timeout=self._limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            await _end(sending, *others)
            await self._chunks.aclose()
        if not done:
            await asyncio.wait({asyncio.ensure_future(_send_last(send, self._late))}, timeout=self._send_timeout)

    async def _send_all(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        await _send_last(send, b"")

    async def _send(self, send: Send, message: Message) -> None:
        self._pending_since = time.monotonic()
        await send(message)
        self._pending_since = None

    async def _until_stuck(self) -> None:
        """A look from time to time costs less than a timeout for each token."""
        while True:
            await asyncio.sleep(self._send_timeout / 4)
            since = self._pending_since
            if since is not None and time.monotonic() - since > self._send_timeout:
                return


async def _send_last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _end(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has hung up; its request has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
