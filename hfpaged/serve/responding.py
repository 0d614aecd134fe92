"""From a request to its answer, whole or streamed: what all endpoints that generate have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from hfpaged.engine.call import Call, Submission
from hfpaged.engine.outputs import RequestOutput
from hfpaged.serve.callers import Caller
from hfpaged.serve.deadline import Deadline
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
    with service.answering():
        work = _to_the_end(service, prepare, caller_of(request))
        outputs = await _while_there(request, work, service.deadline())
    for output in outputs:
        if output.error is not None:
            raise api_error(output.error)
    if _is_long(outputs):  # for tens of milliseconds nobody else would be answered
        content = await asyncio.to_thread(lambda: json_bytes(build(outputs)))
    else:
        content = json_bytes(build(outputs))
    return Response(content, media_type="application/json")


def _is_long(outputs: list[RequestOutput]) -> bool:
    """Whether so many logprobs are told that writing them takes time: some microseconds each."""
    return sum(
        len(output.prompt_logprobs or ()) + sum(len(seq.logprobs or ()) for seq in output.sequences)
        for output in outputs
    ) > 1000  # fmt: skip


async def respond_stream(
    request: Request, prepare: Prepare, chunks: Callable[[Call], AsyncGenerator[bytes]]
) -> EventStream:
    """Stream what `chunks` makes of the requests. What is refused raises before anything is sent: see `respond_whole`.
    `chunks` gives whole events, the last ones and [DONE] included; it may raise ApiError, which is sent as an event.
    """
    service = service_of(request)
    deadline = service.deadline()
    with service.answering():  # who has come before the server stops gets his time, too
        call = await _while_there(request, service.begin(prepare, caller_of(request)), deadline)
    return EventStream(
        _telling_errors(chunks(call)), call.close, send_timeout=service.options.send_timeout, ends=deadline,
        answering=service.answering,
    )  # fmt: skip


async def _to_the_end(service: Service, prepare: Prepare, caller: Caller) -> list[RequestOutput]:
    call = await service.begin(prepare, caller)
    try:
        return await call.last_outputs()
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


async def _while_there(request: Request, work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
    """What `work` gives. It is cancelled when the deadline has come, which raises its ApiError, and when the client
    hangs up: ApiError 499, which nobody will read.
    """
    working, late = asyncio.ensure_future(work), asyncio.ensure_future(deadline())
    tasks: list[asyncio.Future[Any]] = [working, late, asyncio.ensure_future(until_gone(request.receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if late.done():
            raise late.result()
        raise ApiError(499, "the client has closed the connection", code="client_closed_request")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
