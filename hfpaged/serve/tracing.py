"""The spans of requests that came by HTTP: of kind SERVER, and part of the trace that their headers name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from hfpaged.telemetry import conventions as names
from hfpaged.telemetry.propagation import remote_parent
from hfpaged.telemetry.span_options import request_span_options

# Of the endpoints that generate. Threads that a handler starts by asyncio have a copy of its context.
OPERATIONS = {
    "/v1/chat/completions": names.CHAT,
    "/v1/responses": names.CHAT,
    "/v1/completions": names.TEXT_COMPLETION,
}


@contextmanager
def in_trace_of(scope: Scope, path: str) -> Iterator[None]:
    """What requests add inside of this has spans of their caller's trace. Nothing for endpoints that generate none."""
    operation = OPERATIONS.get(path)
    if operation is None:
        yield
        return
    with (
        remote_parent(scope["headers"]),
        request_span_options(operation=operation, kind=SpanKind.SERVER, attributes=_address(scope)),
    ):
        yield


def _address(scope: Scope) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    if scope.get("server"):
        host, port = scope["server"]
        found[names.SERVER_ADDRESS] = host
        if port is not None:
            found[names.SERVER_PORT] = port
    return found
