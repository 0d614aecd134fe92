"""Percentiles of many numbers in little room: counts of buckets that are 1 % wide."""

from __future__ import annotations

import math

_WIDTH = math.log(1.01)


class Sketch:
    """Of positive numbers; a percentile is right to 0.5 % of its value. As DDSketch (Masson et al. 2019, VLDB)."""

    __slots__ = ("_counts", "count", "most", "sum")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count, self.sum, self.most = 0, 0.0, 0.0

    def add(self, value: float, count: int = 1) -> None:
        """`count` times this value."""
        place = round(math.log(value) / _WIDTH) if value > 0 else -(10**6)
        self._counts[place] = self._counts.get(place, 0) + count
        self.count += count
        self.sum += value * count
        if value > self.most:
            self.most = value

    def merge(self, other: Sketch) -> None:
        """All of `other` besides."""
        for place, count in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + count
        self.count, self.sum, self.most = self.count + other.count, self.sum + other.sum, max(self.most, other.most)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """The value that a share of all (0 to 1) does not exceed; None of none."""
        left = share * self.count
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return min(math.exp(place * _WIDTH), self.most) if place > -(10**6) else 0.0
        return self.most if self.count else None
