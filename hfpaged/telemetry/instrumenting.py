"""Switching all of it on and off, as the instrumentations of OpenTelemetry do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

from hfpaged.telemetry import _otel_metrics, _otel_traces, _prometheus

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("hfpaged")

_lock = threading.Lock()
_undo: ExitStack | None = None  # None while nothing is instrumented


def instrument(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None,
    registry: CollectorRegistry | None = None, *, metrics_compat: str | None = None,
) -> None:  # fmt: skip
    """Make spans and metrics of all batchers and calls of generate() with a PagedCache, those to come too.

    Args:
        tracer_provider, meter_provider: OpenTelemetry's; None: the global ones. Without an SDK they do nothing.
        registry: of prometheus_client; None: its default one.
        metrics_compat: "vllm": the same metrics under the names of vLLM besides.

    While it is on already, it changes nothing and says so in the log. Raises InvalidConfigError for other names.
    """
    global _undo
    with _lock:
        if _undo is not None:
            logger.warning("hfpaged is instrumented already; call uninstrument() first to change how")
            return
        with ExitStack() as undo:  # what fails half way is undone
            undo.callback(_otel_traces.install(tracer_provider))
            undo.callback(_otel_metrics.install(meter_provider))
            registry = REGISTRY if registry is None else registry
            undo.callback(_prometheus.install(registry, metrics_compat=metrics_compat))
            _undo = undo.pop_all()


def uninstrument() -> None:
    """Undo `instrument`: spans of requests under way end, and nothing is told any more."""
    global _undo
    with _lock:
        if _undo is None:
            logger.warning("hfpaged is not instrumented, so there is nothing to undo")
            return
        undo, _undo = _undo, None
        undo.close()


def is_instrumented() -> bool:
    """Whether `instrument` is on."""
    return _undo is not None


class HfpagedInstrumentor:
    """What `opentelemetry-instrument` finds by the entry point: it has the methods of a BaseInstrumentor, whose package
    hfpaged does not need for anything else.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """None: hfpaged instruments itself."""
        return ()

    @property
    def is_instrumented_by_opentelemetry(self) -> bool:
        return is_instrumented()

    def instrument(self, **arguments: Any) -> None:
        """See `instrument`; what only concerns dependencies (skip_dep_check ...) is not needed here."""
        known = ("tracer_provider", "meter_provider", "registry", "metrics_compat")
        instrument(**{name: arguments[name] for name in known if name in arguments})

    def uninstrument(self, **arguments: Any) -> None:
        """See `uninstrument`."""
        uninstrument()
