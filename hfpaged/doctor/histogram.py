"""A histogram as an exposition gives it: cumulative counts by upper bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Histogram:
    """`cumulative` has how many values were at most `bounds`, ascending, the last one +Inf; `sum` is of all values."""

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.cumulative[-1] if self.cumulative else 0.0

    @property
    def mean(self) -> float:
        """0 for an empty one."""
        return self.sum / self.count if self.count else 0.0

    def buckets(self) -> Iterator[tuple[float, float, float]]:
        """(values above, up to and including, how many) for each bucket."""
        edges = pairwise((0.0, *self.bounds))
        counts = (after - before for before, after in pairwise((0.0, *self.cumulative)))
        for (low, high), count in zip(edges, counts, strict=True):
            yield low, high, count

    def quantile(self, share: float) -> float | None:
        """Interpolated in its bucket as Prometheus does; beyond the last finite bound that bound. None if empty."""
        rank = share * self.count
        seen = 0.0
        for low, high, count in self.buckets():
            if count > 0 and seen + count >= rank:
                return low if math.isinf(high) else low + (high - low) * (rank - seen) / count
            seen += count
        return None

    def minus(self, earlier: Histogram) -> Histogram:
        """What came since; all of it where the process began anew in between."""
        if self.bounds != earlier.bounds or self.count < earlier.count:
            return self
        counts = tuple(after - before for after, before in zip(self.cumulative, earlier.cumulative, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)
