"""Where the memory and the time went: spans, metrics, and what is shipped to look at them.

    from hfpaged import telemetry

    telemetry.instrument()  # spans and metrics, with the providers that the process has

Importing this changes nothing, and loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpaged.telemetry._prometheus import families, families_of, metrics_text
    from hfpaged.telemetry.instrumenting import instrument, uninstrument
    from hfpaged.telemetry.propagation import remote_parent, trace_headers
    from hfpaged.telemetry.span_options import operation, request_span_options

_HOME_OF = {
    "add_parser": "hfpaged.telemetry.command",
    "families": "hfpaged.telemetry._prometheus",
    "families_of": "hfpaged.telemetry._prometheus",
    "instrument": "hfpaged.telemetry.instrumenting",
    "metrics_text": "hfpaged.telemetry._prometheus",
    "operation": "hfpaged.telemetry.span_options",
    "remote_parent": "hfpaged.telemetry.propagation",
    "request_span_options": "hfpaged.telemetry.span_options",
    "run": "hfpaged.telemetry.command",
    "trace_headers": "hfpaged.telemetry.propagation",
    "uninstrument": "hfpaged.telemetry.instrumenting",
}

__all__ = [
    "families",
    "families_of",
    "instrument",
    "metrics_text",
    "operation",
    "remote_parent",
    "request_span_options",
    "trace_headers",
    "uninstrument",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = attribute
    return attribute
