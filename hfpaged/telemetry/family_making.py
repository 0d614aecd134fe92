"""Readings as metric families of prometheus_client, by the catalog."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from hfpaged.engine.sums import Histogram, Key
from hfpaged.telemetry.catalog import METRICS, Metric
from hfpaged.telemetry.readings import Readings

# A metric's samples: the name of the model and the values of the other labels, and the value.
Numbers = Sequence[tuple[tuple[str, ...], float]]
Histograms = Sequence[tuple[tuple[str, ...], Histogram]]


def families_from(readings: Readings) -> list[Family]:
    """All of the catalog that was read, in its order."""
    numbers, histograms = by_metric(readings)
    made = (_family(each, numbers.get(each.name, ()), histograms.get(each.name, ())) for each in METRICS)
    return [family for family in made if family.samples]


def by_metric(readings: Readings) -> tuple[Mapping[str, Numbers], Mapping[str, Histograms]]:
    """The samples of each metric."""
    numbers: defaultdict[str, list[tuple[tuple[str, ...], float]]] = defaultdict(list)
    histograms: defaultdict[str, list[tuple[tuple[str, ...], Histogram]]] = defaultdict(list)
    for model, sums in readings.models.items():
        for key, number in sums.numbers.items():
            numbers[key[0]].append((_labels(model, key), number))
        for key, histogram in sums.histograms.items():
            histograms[key[0]].append((_labels(model, key), histogram))
    return numbers, histograms


def _labels(model: str, key: Key) -> tuple[str, ...]:
    return (model, *key[1:])


def _family(metric: Metric, numbers: Numbers, histograms: Histograms) -> Family:
    labels = ("model_name", *metric.labels)
    if metric.kind == "histogram":
        return histogram_family(metric.name, metric.help, labels, histograms)
    if metric.kind == "info":
        info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help, labels=())
        for values, _ in numbers:
            info.add_metric((), dict(zip(labels, values, strict=True)))
        return info
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return number_family(kind, metric.name, metric.help, labels, numbers)


def number_family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, labels: Sequence[str],
    numbers: Numbers,
) -> Family:  # fmt: skip
    """Of counters or gauges."""
    family = kind(name, text, labels=labels)
    for values, number in numbers:
        family.add_metric(values, number)
    return family


def histogram_family(name: str, text: str, labels: Sequence[str], histograms: Histograms) -> Family:
    """Cumulated, as Prometheus wants it."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in histograms:
        total, buckets = 0, []
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric(values, buckets=buckets, sum_value=histogram.sum)
    return family
