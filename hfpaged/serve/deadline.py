"""What ends a request before its own end, though its client is there: the limit of its time, or the server's end."""

from __future__ import annotations

import asyncio
import time

import anyio

from hfpaged.serve.http_errors import ApiError


class Deadline:
    """Of one request, from now on: at most `limit` seconds, and not beyond the moment at which `stopped` is set."""

    def __init__(self, limit: float | None, stopped: asyncio.Event) -> None:
        self._limit, self._stopped = limit, stopped
        self._began = time.monotonic()

    async def __call__(self) -> ApiError:
        """Returns when it has come, with what the client is told."""
        left = None if self._limit is None else max(self._limit - (time.monotonic() - self._began), 0)
        with anyio.move_on_after(left):
            await self._stopped.wait()
            return stopping()
        return ApiError(
            503, f"the request took longer than {self._limit:g} seconds, which is this server's limit "
            "(--request-timeout); ask for fewer tokens, or try again when there is less to do", code="request_timeout",
        )  # fmt: skip


def stopping() -> ApiError:
    """To who comes while the server stops, and to who has not ended when its time is over."""
    return ApiError(
        503, "this server is stopping; try again, and another one will answer", code="shutting_down",
        headers={"Connection": "close"},
    )  # fmt: skip
