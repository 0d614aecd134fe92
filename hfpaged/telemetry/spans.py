"""Spans whose times are those of our events, and who computed what others found."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, StatusCode, Tracer

from hfpaged.errors import CallbackError
from hfpaged.prefix_block import Origin
from hfpaged.telemetry import conventions as names
from hfpaged.telemetry.span_attributes import Attributes, captures_content


def nanoseconds(time: float) -> int:
    """Of seconds since the epoch."""
    return int(time * 1e9)


def add_span(
    tracer: Tracer, name: str, context: Context, began: float, ended: float, attributes: Attributes
) -> None:  # fmt: skip
    """A span of something that is over."""
    span = tracer.start_span(name, context, attributes=attributes, start_time=nanoseconds(began))
    span.end(nanoseconds(max(began, ended)))


def set_error(span: Span, error: BaseException, time: float, *, with_words: bool = True) -> None:
    """The span failed; not `with_words`: of the error only its kind is told. What a request's own function raised may
    quote a prompt, so its words stay out too, unless content is asked for.
    """
    with_words = with_words and (not isinstance(error, CallbackError) or captures_content())
    kind = names.error_type(error)
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR, str(error) if with_words else kind)
    if with_words:
        span.record_exception(error, timestamp=nanoseconds(time))


class Origins:
    """The spans of those who computed blocks that are still known."""

    def __init__(self) -> None:
        self._contexts: weakref.WeakKeyDictionary[Origin, SpanContext] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._contexts)

    def put(self, origin: Origin, span: Span) -> None:
        """It stands for what this span tells of."""
        self._contexts[origin] = span.get_span_context()

    def link(self, span: Span, origins: Iterable[Origin]) -> None:
        """The span found what these computed."""
        for origin in origins:
            context = self._contexts.get(origin)
            if context is not None:
                span.add_link(context, {names.LINK: "prefix"})
