"""Spans that stay in the process, to be looked at."""

from __future__ import annotations

import contextlib
import itertools

import tiny_models
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN_CONTEXT
from prometheus_client import CollectorRegistry

import hfpaged
from hfpaged import telemetry
from hfpaged.telemetry import _otel_traces


class Traced:
    """Spans of all that hfpaged does, while it is instrumented."""

    def __init__(self, **arguments):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**arguments)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("the user's own")

    @property
    def spans(self):
        return self.exporter.get_finished_spans()

    @property
    def requests(self):
        """The spans of requests and calls, in the order of their beginning."""
        found = [span for span in self.spans if "gen_ai.operation.name" in span.attributes]
        return sorted(found, key=lambda span: span.start_time)

    def of(self, request_id):
        (found,) = [span for span in self.requests if span.attributes.get("gen_ai.response.id") == request_id]
        return found

    def children(self, parent, name=None):
        """In the order of time."""
        found = [span for span in self.spans if span.parent and span.parent.span_id == parent.context.span_id]
        return sorted((span for span in found if name in (None, span.name)), key=lambda span: span.start_time)

    def shape(self, parent):
        """Names of the children, and their seconds."""
        return [(span.name, seconds(span)) for span in self.children(parent)]

    def check(self):
        """What holds of all spans of hfpaged that have ended."""
        for request in self.requests:
            children = [span for span in self.children(request) if "gen_ai.operation.name" not in span.attributes]
            assert request.start_time <= request.end_time
            assert all(span.context.trace_id == request.context.trace_id for span in children)
            assert {span.name for span in children} <= {"queue", "prefill", "decode"}
            for span in children:
                assert request.start_time <= span.start_time <= span.end_time <= request.end_time
            for event in request.events:
                assert request.start_time <= event.timestamp <= request.end_time
            if request.attributes.get("gen_ai.request.choice.count", 1) == 1:  # samples lie beside each other
                for one, other in itertools.pairwise(children):
                    assert one.end_time <= other.start_time, (one.name, other.name)
            if "gen_ai.usage.output_tokens" in request.attributes:
                tokens = sum(span.attributes.get("hfpaged.tokens", 0) for span in children if span.name == "decode")
                assert tokens == request.attributes["gen_ai.usage.output_tokens"]


def seconds(span):
    return round((span.end_time - span.start_time) / 1e9, 3)


def events_of(span):
    return [event.name for event in span.events]


@contextlib.contextmanager
def tracing(**arguments):
    """Instrumented with a provider that has these arguments."""
    traced = Traced(**arguments)
    telemetry.instrument(traced.provider, registry=CollectorRegistry())
    try:
        yield traced
    finally:
        telemetry.uninstrument()
        traced.check()


def states():
    """What is kept of requests that have not ended, by batcher."""
    return [len(traces) for traces in _otel_traces._traces.values()]


def link_targets(span):
    assert all(link.context != INVALID_SPAN_CONTEXT for link in span.links)
    return [link.context.span_id for link in span.links]


def unpatched(name="llama"):
    model = tiny_models.shared(name)
    hfpaged.unpatch(model)
    return model
