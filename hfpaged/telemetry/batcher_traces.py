"""The hook of one batcher that makes spans. It runs inside of the steps, so it does little, and keeps nothing of those
who are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from hfpaged.engine import events as ev
from hfpaged.telemetry import conventions as names
from hfpaged.telemetry import span_attributes
from hfpaged.telemetry.request_trace import RequestTrace
from hfpaged.telemetry.span_options import options_in
from hfpaged.telemetry.spans import Origins, nanoseconds, set_error

_ACTS: dict[type[ev.Event], Callable[[RequestTrace, Any], None]] = {
    ev.Admitted: RequestTrace.admitted,
    ev.PrefixMatched: RequestTrace.matched,
    ev.Prefilled: RequestTrace.prefilled,
    ev.FirstToken: RequestTrace.first_token,
    ev.Preempted: RequestTrace.preempted,
}


class BatcherTraces:
    """Spans of the requests of a batcher with this model."""

    def __init__(self, tracer: Tracer, origins: Origins, model_name: str, kv_format: str) -> None:
        self._tracer, self._origins, self._model_name, self._kv_format = tracer, origins, model_name, kv_format
        self._with_content = span_attributes.captures_content()
        self._requests: dict[str, RequestTrace] = {}
        self._unsampled: dict[str, Context] = {}  # nothing is recorded of these, but calls that they make must know
        self._is_abandoned = False

    def __len__(self) -> int:
        return len(self._requests) + len(self._unsampled)

    def __call__(self, event: ev.Event) -> None:
        """What the engine tells."""
        if self._is_abandoned:
            return
        kind = type(event)
        act = _ACTS.get(kind)
        if act is not None:
            trace = self._requests.get(event.request_id)  # type: ignore[attr-defined]
            if trace is not None:
                act(trace, event)
        elif isinstance(event, ev.Arrived):
            self._begin(event)
        elif isinstance(event, ev.Ended):
            self._unsampled.pop(event.request_id, None)
            ended = self._requests.pop(event.request_id, None)
            if ended is not None:
                ended.ended(event)
        elif isinstance(event, ev.Rejected):
            self._reject(event)

    def context_of(self, request_id: str) -> Context | None:
        """In which its span is the current one; None where it has none."""
        trace = self._requests.get(request_id)
        return self._unsampled.get(request_id) if trace is None else trace.context

    def abandon(self) -> None:
        """End the spans that are open: nobody will tell of these requests any more, but for the event under way."""
        self._is_abandoned = True
        self._unsampled.clear()
        while self._requests:
            self._requests.popitem()[1].abandon()

    def _begin(self, event: ev.Arrived) -> None:
        parent = event.context.run(otel.get_current)
        span = self._start(parent, event.time)
        if span.is_recording():
            span.set_attributes(span_attributes.of_arrival(event, self._with_content))
            self._requests[event.request_id] = RequestTrace(self._tracer, span, parent, self._origins, event)
            self._origins.put(event.origin, span)
        elif span.get_span_context().is_valid:
            self._unsampled[event.request_id] = set_span_in_context(span, parent)

    def _reject(self, event: ev.Rejected) -> None:
        """A span without length, so that one who looks for his request finds why there was none. What the error says
        may quote what a client wrote.
        """
        span = self._start(otel.get_current(), event.time)
        if span.is_recording():
            if event.request_id:
                span.set_attribute(names.RESPONSE_ID, event.request_id)
            set_error(span, event.error, event.time, with_words=self._with_content)
        span.end(nanoseconds(event.time))

    def _start(self, parent: Context, time: float) -> Span:
        options = options_in(parent)
        attributes = span_attributes.common(options.operation, self._model_name, self._kv_format)
        return self._tracer.start_span(
            f"{options.operation} {self._model_name}", parent, options.kind, {**options.attributes, **attributes},
            start_time=nanoseconds(time),
        )  # fmt: skip
