"""Spans by OpenTelemetry: of requests of all batchers, and of calls of generate() with a PagedCache."""

from __future__ import annotations

import importlib.metadata
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context

from hfpaged.engine import registry
from hfpaged.engine.events import Hook
from hfpaged.telemetry.batcher_traces import BatcherTraces
from hfpaged.telemetry.generate_traces import GenerateTraces
from hfpaged.telemetry.spans import Origins

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher

_traces: weakref.WeakKeyDictionary[ContinuousBatcher, BatcherTraces] = weakref.WeakKeyDictionary()


def install(tracer_provider: trace.TracerProvider | None = None) -> Callable[[], None]:
    """Make spans with this provider, or with the global one, whenever that is set; returns what undoes it."""
    tracer = trace.get_tracer("hfpaged", importlib.metadata.version("hfpaged"), tracer_provider)
    origins = Origins()
    # Hooks whose batchers are gone, perhaps with requests under way. Batchers are collected in the middle of anything,
    # also of what holds the locks of span processors: the spans end later.
    dropped: deque[BatcherTraces] = deque()

    def end_dropped() -> None:
        while dropped:
            dropped.popleft().abandon()

    def hook_of(batcher: ContinuousBatcher) -> Hook:
        from hfpaged import compat

        end_dropped()
        hook = BatcherTraces(tracer, origins, compat.model_name(batcher.model), batcher.pool.kv_format.title)
        _traces[batcher] = hook
        weakref.finalize(batcher, dropped.append, hook).atexit = False
        return hook

    generate = GenerateTraces(tracer, origins)
    registry.watch(hook_of)

    def undo() -> None:
        registry.unwatch(hook_of)
        generate.stop()
        while _traces:
            _traces.popitem()[1].abandon()
        end_dropped()

    return undo


def context_of(batcher: ContinuousBatcher, request_id: str) -> Context | None:
    """In which the span of a request is the current one; None where it has none, or has ended."""
    traces = _traces.get(batcher)
    return None if traces is None else traces.context_of(request_id)
