"""Answers of all replicas as one: metrics with a label that says whose they are, and whether any of them is well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LABEL = "replica"


def gathered_metrics(texts: Mapping[str, str], accept: str | None) -> tuple[bytes, str]:
    """The metrics of all replicas, by their names, in the format that the reader prefers, and its content type. `texts`
    are in Prometheus' own text format.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples.extend(_labelled(family.samples, replica))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type


def _labelled(samples: Iterable[Sample], replica: str) -> list[Sample]:
    return [sample._replace(labels={LABEL: replica, **sample.labels}) for sample in samples]


class _Families:
    """As prometheus_client takes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families
