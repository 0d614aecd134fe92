"""From anything that has metrics to a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import Metric

from hfpaged.doctor.examination import examine
from hfpaged.doctor.exposition import Exposition, from_families, parse
from hfpaged.doctor.findings import Diagnosis
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.sources import scrape
from hfpaged.errors import MetricsError


def diagnose(source: Any, model_name: str | None = None) -> Diagnosis:
    """What is wrong with what `source` tells of: a ContinuousBatcher, families of prometheus_client, the text of a
    scrape, a URL or a file. `model_name` chooses where there are several.

    Raises MetricsError for what cannot be read, is not of hfpaged, or has several models and none is named.
    """
    exposition = _taken(source)
    names = exposition.model_names
    if model_name is None and len(names) > 1:
        raise MetricsError(f"there are metrics of {len(names)} models ({', '.join(names)}); name one with model_name=")
    return examine(Reading.of(exposition, names[0] if model_name is None else model_name))


def _taken(source: Any) -> Exposition:
    if isinstance(source, str):
        return parse(source) if "\n" in source.strip() else scrape(source)
    if hasattr(source, "add_request"):
        return from_families(_families(source), "the batcher")
    if isinstance(source, Iterable):
        return from_families(source)
    raise MetricsError(f"{source!r} has no metrics; give a ContinuousBatcher, families, the text of a scrape or a URL")


def _families(batcher: Any) -> list[Metric]:
    from hfpaged.telemetry import families_of

    return families_of(batcher)
