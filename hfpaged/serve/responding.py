"""From a request to its answer, whole or streamed: what all endpoints that generate have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response

from hfpaged.engine.call import Call, Submission
from hfpaged.engine.outputs import RequestOutput
from hfpaged.serve.callers import Caller
from hfpaged.serve.event_stream import EventStream, event, until_gone
from hfpaged.serve.http_errors import ApiError, api_error
from hfpaged.serve.json_text import json_bytes
from hfpaged.serve.service import Service

T = TypeVar("T")
Prepare = Callable[[], Iterable[Submission]]


def service_of(request: Request) -> Service:
    """Of the application that got the request."""
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> Caller:
    """Who asks, as the gate has found out."""
    caller: Caller = request.scope["hfpaged.caller"]
    return caller


async def respond_whole(request: Request, prepare: Prepare, build: Callable[[list[RequestOutput]], Any]) -> Response:
    """Run the requests to their end, and give back what `build` makes of them, as JSON. A client who hangs up aborts
    them. Raises ApiError, and what `Service.begin` raises.
    """
    service = service_of(request)
    outputs = await _while_there(request, _to_the_end(service, prepare, caller_of(request)))
    for output in outputs:
        if output.error is not None:
            raise api_error(output.error)
    return Response(json_bytes(build(outputs)), media_type="application/json")


async def respond_stream(
    request: Request, prepare: Prepare, chunks: Callable[[Call], AsyncGenerator[bytes]]
) -> EventStream:
    """Stream what `chunks` makes of the requests. What is refused raises before anything is sent: see `respond_whole`.
    `chunks` gives whole events, the last ones and [DONE] included; it may raise ApiError, which is sent as an event.
    """
    service = service_of(request)
    call = await _while_there(request, service.begin(prepare, caller_of(request)))
    options = service.options
    return EventStream(
        _telling_errors(chunks(call)), call.close, send_timeout=options.send_timeout, limit=options.request_timeout,
        late=event(_too_long(options.request_timeout).body),
    )  # fmt: skip


async def _to_the_end(service: Service, prepare: Prepare, caller: Caller) -> list[RequestOutput]:
    limit = service.options.request_timeout
    call = await service.begin(prepare, caller)
    try:
        with anyio.fail_after(limit):
            return await call.last_outputs()
    except TimeoutError:
        raise _too_long(limit) from None
    finally:
        call.close()


async def _telling_errors(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """What is sent has begun with status 200, so that an error can only be an event."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        yield event(api_error(error).body)


def _too_long(limit: float | None) -> ApiError:
    return ApiError(
        503, f"the request took longer than {limit} seconds, which is this server's limit (--request-timeout); ask for "
        "fewer tokens, or try again when there is less to do", code="request_timeout",
    )  # fmt: skip


async def _while_there(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client hangs up, and ApiError 499 raised, which nobody will read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client has closed the connection", code="client_closed_request")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
