"""Counters and histograms as plain numbers, by metric and the values of its labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# The name of a metric, and the values of its labels.
Key = tuple[str, ...]


class Histogram:
    """How many values lie in each bucket, up to and with its bound; one bucket more for those beyond all."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    @property
    def count(self) -> int:
        """All values."""
        return sum(self.counts)

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times this value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def add(self, other: Histogram) -> None:
        """All that `other`, of the same bounds, has."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


class Sums:
    """Numbers and histograms that come into being with their first count, or when they are named: a counter that is 0
    shall be seen, for rates begin with it.
    """

    __slots__ = ("histograms", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[Key, float] = {}
        self.histograms: dict[Key, Histogram] = {}

    def name(self, metric: str, labels: Iterable[str]) -> None:
        """Begin with 0 for each of these values of the one label of a metric."""
        for label in labels:
            self.numbers.setdefault((metric, label), 0)

    def count(self, key: Key, number: float = 1) -> None:
        """So many more."""
        self.numbers[key] = self.numbers.get(key, 0) + number

    def histogram(self, key: Key, bounds: tuple[float, ...]) -> Histogram:
        """That one, new if there was none."""
        if key not in self.histograms:
            self.histograms[key] = Histogram(bounds)
        return self.histograms[key]

    def add(self, other: Sums) -> None:
        """All that `other` has."""
        for key, number in list(other.numbers.items()):
            self.count(key, number)
        for key, histogram in list(other.histograms.items()):
            self.histogram(key, histogram.bounds).add(histogram)
