"""The context of a trace comes in with a request and goes out with what it calls, by the process's propagators: W3C
trace context, unless OTEL_PROPAGATORS names others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as otel
from opentelemetry import propagate
from opentelemetry.propagators.textmap import Getter

from hfpaged.telemetry import _otel_traces

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher

Name = str | bytes
Headers = Mapping[str, str] | Mapping[bytes, bytes] | Iterable[tuple[Name, Name]]
_Carrier = dict[str, list[str]]


@contextmanager
def remote_parent(headers: Headers) -> Iterator[None]:
    """Requests that are added inside of this, and calls of generate(), belong to the trace that HTTP headers name: a
    mapping, or pairs as ASGI has them. Headers that are missing or malformed change nothing.
    """
    token = otel.attach(propagate.extract(_carrier(headers), otel.get_current(), _HeaderGetter()))
    try:
        yield
    finally:
        otel.detach(token)


def trace_headers(batcher: ContinuousBatcher | None = None, request_id: str | None = None) -> dict[str, str]:
    """The headers by which a service that is called joins the trace: that of a request under way, or without arguments
    that of the current span, as inside of generate(). Empty where there is none.
    """
    headers: dict[str, str] = {}
    if batcher is None or request_id is None:
        propagate.inject(headers)
    elif (context := _otel_traces.context_of(batcher, request_id)) is not None:
        propagate.inject(headers, context)
    return headers


class _HeaderGetter(Getter[_Carrier]):
    def get(self, carrier: _Carrier, key: str) -> list[str] | None:
        values = carrier.get(key.lower())
        if values and len(values) > 1 and key == "traceparent":
            return None  # there is no telling which of them is right
        return values

    def keys(self, carrier: _Carrier) -> list[str]:
        return list(carrier)


def _carrier(headers: Headers) -> _Carrier:
    """By names in lower case, as HTTP knows no other difference."""
    found: _Carrier = {}
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        found.setdefault(_text(name).lower(), []).append(_text(value))
    return found


def _text(given: Name) -> str:
    return given.decode("latin-1") if isinstance(given, bytes) else given
