"""What a scrape says, as a reader of Prometheus's format finds it: figures by name and labels."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families


class Figures:
    """Samples of one scrape, or of families; of one model if it is named."""

    def __init__(self, source: str | Iterable[Family], model_name: str | None = None) -> None:
        families = list(text_string_to_metric_families(source) if isinstance(source, str) else source)
        self.types = {family.name: family.type for family in families}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if model_name in (None, sample.labels.get("model_name"))
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels; a KeyError where there is none."""
        found = [
            value for key, value in self.samples.items() if key[0] == name and labels.items() <= dict(key[1]).items()
        ]
        if not found:
            raise KeyError(f"{name}{labels}")
        return sum(found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name, by the value of one label."""
        return {dict(labels)[label]: value for (sample, labels), value in self.samples.items() if sample == name}

    @property
    def names(self) -> set[str]:
        """Of all samples."""
        return {name for name, _ in self.samples}
