"""What /metrics tells: everything of the process, in a registry of the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from hfpaged.telemetry import _prometheus


@contextmanager
def watching(registry: CollectorRegistry, metrics_compat: str | None) -> Iterator[None]:
    """Meanwhile `registry` collects hfpaged's metrics, and those of the process, which every dashboard knows."""
    undo = _prometheus.install(registry, metrics_compat=metrics_compat)
    own = [make(registry=registry) for make in (ProcessCollector, PlatformCollector, GCCollector)]
    try:
        yield
    finally:
        undo()
        for collector in own:
            registry.unregister(collector)


def exposition(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """The metrics and their content type, in the format that the reader prefers."""
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type
