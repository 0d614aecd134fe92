"""What OpenTelemetry says in the log while its receiver is away, once: its exporters say it for each batch."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("hfpaged")

_SOURCE = "opentelemetry"
_DELIVERY = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.metrics")


class DeliveryLog(logging.Handler):
    """Passes each kind of warning on once. That spans or metrics do not arrive is one kind, whoever says so."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """A warning of OpenTelemetry."""
        is_delivery = record.name.startswith(_DELIVERY)
        # By where it is said, as the words may hold numbers that are others each time.
        kind = "delivery" if is_delivery else f"{record.pathname}:{record.lineno}"
        if kind in self._said:
            return
        self._said.add(kind)
        logger.warning(f"telemetry is not delivered, and this is said once: {record.getMessage()}" if is_delivery
                       else record.getMessage())  # fmt: skip


def say_once() -> Callable[[], None]:
    """From now on; returns what undoes it."""
    source, handler = logging.getLogger(_SOURCE), DeliveryLog()
    source.addHandler(handler)
    propagated, source.propagate = source.propagate, False

    def undo() -> None:
        source.removeHandler(handler)
        source.propagate = propagated

    return undo
