"""An ASGI application that is fed in its own process: whole requests go in, and messages come out as they are made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger("hfpaged")

GONE: Message = {"type": "http.disconnect"}
LEAVING_SECONDS = 10.0  # that an application has to end a request whose client has gone


class Hosted:
    """`alive` is entered by `start` and left by `stop`, both in one task: what an application opens in a task it must
    close there.
    """

    def __init__(self, app: ASGIApp, alive: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._app, self._alive = app, alive
        self._stopping = asyncio.Event()
        self._living: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises what the start of the application raises."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._living = asyncio.ensure_future(self._live(started))
        await asyncio.wait({started, self._living}, return_when=asyncio.FIRST_COMPLETED)
        if self._living.done():
            self._living.result()

    async def stop(self) -> None:
        """Returns when the application has ended."""
        self._stopping.set()
        if self._living is not None:
            await self._living

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """The messages of one answer, as many at a time as there are. Closing this early means that the client has
        gone, which the application is told of.
        """
        call = _Call(body)
        task = asyncio.ensure_future(self._app(scope, call.receive, call.send))
        task.add_done_callback(call.end)
        try:
            while messages := await call.messages():
                yield messages
        finally:
            call.hang_up()
            _, running = await asyncio.wait({task}, timeout=LEAVING_SECONDS)
            task.cancel()
            if not running and not task.cancelled() and task.exception() is not None:
                logger.error("a request failed", exc_info=task.exception())

    async def _live(self, started: asyncio.Future[None]) -> None:
        async with self._alive():
            started.set_result(None)
            await self._stopping.wait()


class _Call:
    """Both ends of one request."""

    def __init__(self, body: bytes) -> None:
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._made: list[Message] = []
        self._news, self._gone = asyncio.Event(), asyncio.Event()
        self._is_over = False

    async def receive(self) -> Message:
        if self._request is not None:
            message, self._request = self._request, None
            return message
        await self._gone.wait()
        return GONE

    async def send(self, message: Message) -> None:
        self._made.append(message)
        self._news.set()

    async def messages(self) -> list[Message]:
        """Those that came since the last time, at least one; none at the end."""
        if not self._is_over:
            await self._news.wait()
        self._news.clear()
        made, self._made = self._made, []
        return made

    def end(self, _: Any) -> None:
        """No message comes any more."""
        self._is_over = True
        self._news.set()

    def hang_up(self) -> None:
        """The client reads no more."""
        self._gone.set()
