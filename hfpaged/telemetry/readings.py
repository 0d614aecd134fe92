"""All figures of a process at one moment, by model, before anybody's format."""

from __future__ import annotations

from hfpaged.engine.sums import Sums

# Of a pool that nobody made for a model: PagedCache(config=...).
UNNAMED = "unnamed"


class Readings:
    """For each model the sums over what belongs to it: pools, batchers, calls of generate()."""

    def __init__(self) -> None:
        self.models: dict[str, Sums] = {}

    def of(self, model: str) -> Sums:
        """Those of one model."""
        return self.models.setdefault(model or UNNAMED, Sums())

    def count(self, model: str, metric: str, value: float, *labels: str) -> None:
        """So many more."""
        self.of(model).count((metric, *labels), value)

    def most(self, model: str, metric: str, value: float, *labels: str) -> None:
        """The largest one counts, where a sum would say nothing."""
        numbers = self.of(model).numbers
        key = (metric, *labels)
        numbers[key] = max(value, numbers.get(key, value))
