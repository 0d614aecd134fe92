"""Switching all of it on and off, as the instrumentations of OpenTelemetry do."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from hfpaged.telemetry import _otel_traces

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("hfpaged")

Undo = Callable[[], None]

_lock = threading.Lock()
_undo: list[Undo] | None = None  # in the order of installing; None while nothing is instrumented


def instrument(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None,
    registry: CollectorRegistry | None = None, *, metrics_compat: str | None = None,
) -> None:  # fmt: skip
    """Make spans and metrics of all batchers and calls of generate() with a PagedCache, those to come too.

    Args:
        tracer_provider, meter_provider: OpenTelemetry's; None: the global ones. Without an SDK they do nothing.
        registry: of prometheus_client; None: its default one.
        metrics_compat: "vllm": the same metrics under the names of vLLM besides.

    While it is on already, it changes nothing and says so in the log.
    """
    global _undo
    with _lock:
        if _undo is not None:
            logger.warning("hfpaged is instrumented already; call uninstrument() first to change how")
            return
        done: list[Undo] = []
        try:
            done.append(_otel_traces.install(tracer_provider))
            done += _install_metrics(meter_provider, registry, metrics_compat)
        except BaseException:
            _undo_all(done)
            raise
        _undo = done


def uninstrument() -> None:
    """Undo `instrument`: spans of requests under way end, and nothing is told any more."""
    global _undo
    with _lock:
        if _undo is None:
            logger.warning("hfpaged is not instrumented, so there is nothing to undo")
            return
        done, _undo = _undo, None
        _undo_all(done)


def is_instrumented() -> bool:
    """Whether `instrument` is on."""
    return _undo is not None


def _install_metrics(
    meter_provider: MeterProvider | None, registry: CollectorRegistry | None, metrics_compat: str | None
) -> list[Undo]:
    if importlib.util.find_spec("hfpaged.telemetry._prometheus") is None:
        return []
    if registry is None:
        from prometheus_client import REGISTRY as registry
    otel = importlib.import_module("hfpaged.telemetry._otel_metrics")
    prometheus = importlib.import_module("hfpaged.telemetry._prometheus")
    return [otel.install(meter_provider), prometheus.install(registry, metrics_compat=metrics_compat)]


def _undo_all(done: list[Undo]) -> None:
    """The last one first."""
    for undo in reversed(done):
        undo()


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
