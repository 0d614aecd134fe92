"""Providers of OpenTelemetry from the standard OTEL_* variables: for programs, which own their process. A library takes
those that are there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hfpaged.errors import InvalidConfigError

# What names a receiver. Each of the two kinds has its own name for the endpoint besides the common one.
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_EXPORTERS = {
    "OTEL_TRACES_EXPORTER": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_METRICS_EXPORTER": "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
}
# A receiver that does not answer must not keep a process from ending.
FLUSH_SECONDS = 5.0


def are_asked_for() -> bool:
    """Whether the environment names a receiver of spans or metrics, or a file that does."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = [os.environ.get(name, "").strip().lower() for name in _EXPORTERS]
    places = (_ENDPOINT, *_EXPORTERS.values(), "OTEL_CONFIG_FILE")
    return any(name not in ("", "none") for name in exporters) or any(os.environ.get(name) for name in places)


def install_providers(service_name: str = "hfpaged") -> Callable[[], None]:
    """Make the global providers as the OTEL_* variables say; returns what delivers the rest and shuts them down, in
    FLUSH_SECONDS at most. Providers that are there already are left alone.

    `service_name` is for processes without OTEL_SERVICE_NAME. Where an endpoint is set and no exporter is, it is
    "otlp". Raises InvalidConfigError for exporters that are not installed, and for protocols that nobody knows.
    """
    if _are_set() or not are_asked_for():
        return _nothing
    for name, endpoint in _EXPORTERS.items():
        if os.environ.get(_ENDPOINT) or os.environ.get(endpoint):
            os.environ.setdefault(name, "otlp")
    undo_log = _say_once()
    try:
        _configure(service_name)
    except RuntimeError as error:  # what the SDK raises for all that it does not find
        undo_log()
        remedy = (
            "pip install 'hfpaged[otlp]'"
            if "otlp_proto" in str(error)
            else "name otlp, console or none, with grpc or http/protobuf"
        )
        raise InvalidConfigError(f"the OTEL_* variables ask for what is not there: {error}; {remedy}") from error

    def end() -> None:
        if shut_down(*_global_providers()):
            undo_log()  # else they go on saying that they cannot

    return end


@contextmanager
def observed(service_name: str = "hfpaged") -> Iterator[None]:
    """Spans and metrics of what runs inside, if the environment asks for any; all is delivered when it is left."""
    if not are_asked_for():
        yield
        return
    from hfpaged.telemetry.instrumenting import instrument, is_instrumented, uninstrument

    end = install_providers(service_name)
    is_ours = not is_instrumented()
    if is_ours:
        instrument()
    try:
        yield
    finally:
        end()  # the last look at the metrics is part of it
        if is_ours:
            uninstrument()


def _global_providers() -> tuple[Any, Any]:
    from opentelemetry import metrics, trace

    return trace.get_tracer_provider(), metrics.get_meter_provider()


def _are_set() -> bool:
    """Whether somebody has set providers: the API's own only stand for those to come."""
    own = ("opentelemetry.trace", "opentelemetry.metrics")
    return any(not type(provider).__module__.startswith(own) for provider in _global_providers())


def _configure(service_name: str) -> None:
    """By the SDK's own reading of the variables, which all distributions of OpenTelemetry share."""
    from opentelemetry.sdk._configuration import _OTelSDKConfigurator

    is_named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_in_file = bool(os.environ.get("OTEL_CONFIG_FILE"))
    arguments = {} if is_named or is_in_file else {"resource_attributes": {"service.name": service_name}}
    _OTelSDKConfigurator().configure(**arguments)


def _say_once() -> Callable[[], None]:
    from hfpaged.telemetry.delivery_log import say_once

    return say_once()


def shut_down(*providers: Any) -> bool:
    """Deliver what is left and shut providers down, all at once and in FLUSH_SECONDS at most; whether that was enough.
    Threads that hang are left behind, and end with the process.
    """
    threads = [
        threading.Thread(target=provider.shutdown, name="hfpaged-flush", daemon=True)
        for provider in providers
        if hasattr(provider, "shutdown")
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + FLUSH_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in threads)


def _nothing() -> None:
    pass
