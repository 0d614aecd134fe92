"""What the doctor knows of one model: figures by the names of hfpaged.telemetry.catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from hfpaged.doctor.exposition import Exposition, Sample
from hfpaged.doctor.histogram import Histogram
from hfpaged.errors import MetricsError
from hfpaged.telemetry.catalog import BY_NAME

# What histograms add to their names.
PARTS = ("_bucket", "_count", "_sum")

_T = TypeVar("_T")


class Lacks(Exception):
    """A figure that is not there; str() names it."""


@dataclass(frozen=True)
class Reading:
    """Counters and histograms count since the process began, or over `seconds` where this is the difference of two
    readings.
    """

    model_name: str
    samples: Mapping[str, list[Sample]]
    known: frozenset[str]
    seconds: float | None = None

    @classmethod
    def of(cls, exposition: Exposition, model_name: str) -> Reading:
        """Of one model, with what belongs to none. Raises MetricsError for a model that is not there."""
        if model_name not in exposition.model_names:
            raise MetricsError(
                f"no model is named {model_name!r} in these metrics; there are "
                f"{', '.join(map(repr, exposition.model_names))}"
            )
        samples = {
            name: [each for each in found if each.labels.get("model_name", "") in ("", model_name)]
            for name, found in exposition.samples.items()
        }
        return cls(model_name, samples, exposition.known)

    def get(self, name: str, **labels: str) -> float | None:
        """The sum over all series with these labels; 0 where none has begun yet, None where there is no such metric."""
        return sum(each.value for each in self._having(name, labels)) if name in self.known else None

    def total(self, name: str, **labels: str) -> float:
        """As `get`. Raises Lacks."""
        return self._need(name, self.get(name, **labels))

    def largest(self, name: str, **labels: str) -> float:
        """Of all series with these labels: for limits and times. Raises Lacks where there is none."""
        found = [each.value for each in self._having(name, labels)]
        return self._need(name, max(found, default=None), labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label; spaces in its values are underscores. Raises Lacks."""
        self._need(name, self.get(name))
        sums: dict[str, float] = {}
        for each in self.samples.get(name, ()):
            value = each.labels.get(label, "").replace(" ", "_")
            sums[value] = sums.get(value, 0.0) + each.value
        return sums

    def label(self, name: str, label: str) -> str:
        """The value of a label of an info. Raises Lacks."""
        found = (each.labels[label] for each in self.samples.get(name, ()) if label in each.labels)
        return self._need(name, next(found, None))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """The sum of all series with these labels. Raises Lacks."""
        self._need(name, True if name in self.known or f"{name}_bucket" in self.known else None)
        counts: dict[float, float] = {}
        for each in self._having(f"{name}_bucket", labels):
            bound = float(each.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + each.value
        total = sum(each.value for each in self._having(f"{name}_sum", labels))
        return Histogram(tuple(sorted(counts)), tuple(counts[bound] for bound in sorted(counts)), total)

    def since(self, earlier: Reading, seconds: float) -> Reading:
        """What happened in the `seconds` between two readings; gauges are those of this one."""
        changed = {
            name: _difference(name, found, earlier.samples.get(name, [])) for name, found in self.samples.items()
        }
        return replace(self, samples=changed, seconds=seconds)

    def _having(self, name: str, labels: Mapping[str, str]) -> list[Sample]:
        found = self.samples.get(name, [])
        return [each for each in found if all(each.labels.get(label) == value for label, value in labels.items())]

    def _need(self, name: str, value: _T | None, labels: Mapping[str, str] | None = None) -> _T:
        if value is None:
            chosen = ",".join(f'{label}="{text}"' for label, text in (labels or {}).items())
            raise Lacks(f"{name}{{{chosen}}}" if chosen else name)
        return value


def _difference(name: str, now: list[Sample], before: list[Sample]) -> list[Sample]:
    if not _counts(name):
        return now
    old = {_key(each): each.value for each in before}
    return [each._replace(value=_grown(each.value, old.get(_key(each), 0.0))) for each in now]


def _counts(name: str) -> bool:
    metric = BY_NAME.get(name) or next((BY_NAME.get(name.removesuffix(p)) for p in PARTS if name.endswith(p)), None)
    return metric is not None and metric.kind in ("counter", "histogram")


def _grown(now: float, before: float) -> float:
    """A counter that has become smaller began anew."""
    return now - before if now >= before else now


def _key(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(sample.labels.items()))
