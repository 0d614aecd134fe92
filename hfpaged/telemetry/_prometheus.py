"""All metrics for Prometheus: a collector that reads them when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from hfpaged.errors import InvalidConfigError
from hfpaged.telemetry.collector import read_all, read_one
from hfpaged.telemetry.family_making import families_from
from hfpaged.telemetry.generate_tally import GENERATE
from hfpaged.telemetry.vllm_names import vllm_families

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher

COMPAT = ("vllm",)


def install(registry: CollectorRegistry, *, metrics_compat: str | None = None) -> Callable[[], None]:
    """Let `registry` collect all metrics of this process; returns what undoes it.

    metrics_compat: "vllm": the same numbers under the names of vLLM besides.

    Raises InvalidConfigError for any other one.
    """
    if metrics_compat is not None and metrics_compat not in COMPAT:
        raise InvalidConfigError(f"metrics_compat={metrics_compat!r} is not known; use {' or '.join(COMPAT)}, or None")
    collector = ProcessCollector(metrics_compat)
    registry.register(collector)
    GENERATE.watch()

    def undo() -> None:
        registry.unregister(collector)
        GENERATE.unwatch()

    return undo


class ProcessCollector(Collector):
    """Reads the whole process at each scrape."""

    def __init__(self, metrics_compat: str | None = None) -> None:
        self._compat = metrics_compat

    def collect(self) -> Iterable[Family]:
        """The families of the catalog, and those of others' names."""
        readings = read_all()
        return families_from(readings) + (vllm_families(readings) if self._compat == "vllm" else [])

    def describe(self) -> Iterable[Family]:
        """Nothing: a registry that is given a collector would collect, to know its names."""
        return ()


def families() -> list[Family]:
    """All metrics of the process, as prometheus_client's families. Calls of generate() are counted only while
    `instrument` is on.
    """
    return families_from(read_all())


def families_of(batcher: ContinuousBatcher) -> list[Family]:
    """The metrics of one batcher and its pool."""
    return families_from(read_one(batcher))


def metrics_text(batcher: ContinuousBatcher | None = None) -> str:
    """All metrics of the process, or of one batcher and its pool, as Prometheus reads them: to be saved or looked at,
    and for `hfpaged doctor FILE`.
    """
    registry = CollectorRegistry()
    registry.register(_Given(families() if batcher is None else families_of(batcher)))
    return generate_latest(registry).decode()


class _Given(Collector):
    def __init__(self, given: list[Family]) -> None:
        self._given = given

    def collect(self) -> Iterable[Family]:
        return self._given

    def describe(self) -> Iterable[Family]:
        return ()
