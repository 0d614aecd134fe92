"""What a caller says of the spans of his requests: it travels in his context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from hfpaged.telemetry import conventions as names

_KEY = otel.create_key("hfpaged-request-span")


class SpanOptions(NamedTuple):
    """Of the span of a request or of a call of generate()."""

    operation: str = names.TEXT_COMPLETION
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, AttributeValue] = {}


_DEFAULT = SpanOptions()


def options_in(context: Context) -> SpanOptions:
    """Those that hold in a context."""
    found = otel.get_value(_KEY, context)
    return found if isinstance(found, SpanOptions) else _DEFAULT


@contextmanager
def request_span_options(
    *, operation: str | None = None, kind: SpanKind | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Requests that are added inside of this, and calls of generate(), have spans of this operation ("chat",
    "text_completion") and kind, with these attributes besides. What is not given is as it is outside.
    """
    outer = options_in(otel.get_current())
    inner = SpanOptions(operation or outer.operation, kind or outer.kind, {**outer.attributes, **(attributes or {})})
    token = otel.attach(otel.set_value(_KEY, inner))
    try:
        yield
    finally:
        otel.detach(token)


@contextmanager
def operation(name: str) -> Iterator[None]:
    """Requests that are added inside of this, and calls of generate(), are of this operation: "chat"."""
    with request_span_options(operation=name):
        yield
