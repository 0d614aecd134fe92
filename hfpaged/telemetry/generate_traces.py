"""Spans of calls of generate() with a PagedCache. While a call runs, its span is the current one of its thread."""

from __future__ import annotations

from contextvars import Token
from dataclasses import dataclass

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from hfpaged import generation_events
from hfpaged.generation_events import (
    GenerationBegan,
    GenerationCall,
    GenerationEnded,
    GenerationEvent,
    GenerationPrefilled,
)
from hfpaged.telemetry import conventions as names
from hfpaged.telemetry import span_attributes
from hfpaged.telemetry.span_options import options_in
from hfpaged.telemetry.spans import Origins, add_span, nanoseconds, set_error


@dataclass
class _CallTrace:
    span: Span
    context: Context
    token: Token[Context]
    prefilled: float | None = None


class GenerateTraces:
    """Watches all calls of this process, until `stop` and the end of those that run then."""

    def __init__(self, tracer: Tracer, origins: Origins) -> None:
        self._tracer, self._origins = tracer, origins
        self._calls: dict[GenerationCall, _CallTrace] = {}
        self._is_stopped = False
        generation_events.watch(self)

    def __len__(self) -> int:
        return len(self._calls)

    def __call__(self, event: GenerationEvent) -> None:
        """What generate() tells."""
        if isinstance(event, GenerationBegan):
            self._begin(event.call)
        elif isinstance(event, GenerationPrefilled):
            self._prefilled(event)
        elif isinstance(event, GenerationEnded):
            self._end(event)

    def stop(self) -> None:
        """Watch no new calls. A call that runs has its span in the context of its thread, and must take it out."""
        self._is_stopped = True
        if not self._calls:
            generation_events.unwatch(self)

    def _begin(self, call: GenerationCall) -> None:
        if self._is_stopped:
            return
        parent = otel.get_current()
        options = options_in(parent)
        attributes = span_attributes.common(options.operation, call.model_name, call.kv_format)
        span = self._tracer.start_span(
            f"{options.operation} {call.model_name}", parent, options.kind, {**options.attributes, **attributes},
            start_time=nanoseconds(call.began),
        )  # fmt: skip
        if not span.get_span_context().is_valid:  # there is no SDK, and nobody to know of it
            return
        context = set_span_in_context(span, parent)
        self._calls[call] = _CallTrace(span, context, otel.attach(context))
        if span.is_recording():
            span.set_attributes(span_attributes.of_call(call))
            self._origins.put(call.origin, span)
        if self._is_stopped and self._take(call):  # by another thread, meanwhile: nobody would tell of its end
            span.end()

    def _prefilled(self, event: GenerationPrefilled) -> None:
        trace = self._calls.get(event.call)
        if trace is None or not trace.span.is_recording():
            return
        trace.prefilled = event.time
        reason = ", ".join(reason for reason in dict.fromkeys(event.reasons) if reason != "complete")
        trace.span.set_attributes(span_attributes.of_match(event, reason))
        trace.span.set_attribute(names.USAGE_CACHE_READ, event.past + event.hit)
        self._origins.link(trace.span, event.computed_by)
        tokens = max(event.call.prompt_tokens - event.past - event.hit, 0)
        attributes: span_attributes.Attributes = {names.TOKENS: tokens}
        add_span(self._tracer, names.PREFILL_SPAN, trace.context, event.began, event.time, attributes)

    def _end(self, event: GenerationEnded) -> None:
        trace = self._take(event.call)
        if trace is None:
            return
        try:
            if trace.span.is_recording():
                self._say_end(trace, event)
        finally:
            trace.span.end(nanoseconds(event.time))

    def _take(self, call: GenerationCall) -> _CallTrace | None:
        """What is kept of a call, out of the context of its thread."""
        trace = self._calls.pop(call, None)
        if trace is not None:
            otel.detach(trace.token)
        if self._is_stopped and not self._calls:
            generation_events.unwatch(self)
        return trace

    def _say_end(self, trace: _CallTrace, event: GenerationEnded) -> None:
        span = trace.span
        if event.first_token_time is not None:
            span.add_event(names.FIRST_TOKEN_EVENT, timestamp=nanoseconds(event.first_token_time))
        if trace.prefilled is not None:
            attributes: span_attributes.Attributes = {names.FORWARDS: event.forwards - 1}
            if event.error is None:
                attributes[names.TOKENS] = event.output_tokens
            add_span(self._tracer, names.DECODE_SPAN, trace.context, trace.prefilled, event.time, attributes)
        span.set_attributes(span_attributes.of_call_end(event))
        if event.error is not None:
            set_error(span, event.error, event.time)
