"""The gauges and counters of the catalog as OpenTelemetry's observable instruments, read when a reader collects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from hfpaged.telemetry.catalog import METRICS, Metric
from hfpaged.telemetry.collector import read_all
from hfpaged.telemetry.family_making import Numbers, by_metric

# Parts of hfpaged that names are sorted by: hfpaged_kv_usage_ratio is hfpaged.kv.usage_ratio.
AREAS = ("kv", "prefix", "requests", "step", "engine", "generate", "device", "model")
UNITS = {"byte_seconds": "", "seconds": "s", "bytes": "By", "ratio": "1"}


def dotted(name: str) -> str:
    """The name of an instrument: as exporters translate it, with `_total` for counters, it is that of the catalog."""
    area, _, rest = name.removeprefix("hfpaged_").removesuffix("_total").partition("_")
    return f"hfpaged.{area}.{rest}" if area in AREAS and rest else f"hfpaged.{area}_{rest}".removesuffix("_")


def unit_of(name: str) -> str:
    """As UCUM writes it, "" for what is counted."""
    plain = name.removesuffix("_total")
    return next((unit for words, unit in UNITS.items() if plain.endswith(f"_{words}")), "")


class Observables:
    """All instruments of one meter. They cannot be taken back: while it is not `is_on` they observe nothing.

    A collection asks instrument after instrument; all of it shall be of one moment, and be read once. So what was read
    serves each of them once.
    """

    MOST_SECONDS = 1.0  # that what was read is of use

    def __init__(self, meter: Meter) -> None:
        self.is_on = False
        self._lock = threading.Lock()
        self._numbers: Mapping[str, Numbers] = {}
        self._served: set[str] = set()
        self._read_time = -float("inf")
        for metric in METRICS:
            if metric.kind == "counter":
                meter.create_observable_counter(*self._arguments(metric))
            elif metric.kind != "histogram":
                meter.create_observable_gauge(*self._arguments(metric))

    def _arguments(
        self, metric: Metric
    ) -> tuple[str, list[Callable[[CallbackOptions], Iterable[Observation]]], str, str]:
        labels = ("model_name", *metric.labels)

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            numbers = self._read(metric.name)
            return [Observation(number, dict(zip(labels, values, strict=True))) for values, number in numbers]

        return dotted(metric.name), [observe], unit_of(metric.name), metric.help

    def _read(self, name: str) -> Numbers:
        if not self.is_on:
            return ()
        with self._lock:
            if name in self._served or time.monotonic() - self._read_time > self.MOST_SECONDS:
                self._numbers, _ = by_metric(read_all())
                self._served, self._read_time = set(), time.monotonic()
            self._served.add(name)
            return self._numbers.get(name, ())
