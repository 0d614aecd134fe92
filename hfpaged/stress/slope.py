"""How much something grows with each request, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Z = 1.96  # of a normal distribution, two sides, 95 %


class Slope(NamedTuple):
    """By least squares, with half of its 95 % interval. `span` is how far x went."""

    each: float
    margin: float
    span: float

    @property
    def surely(self) -> float:
        """The growth over the whole span that is sure: its lower bound."""
        return (self.each - self.margin) * self.span

    @property
    def at_most(self) -> float:
        """The growth over the whole span that cannot be excluded: its upper bound."""
        return (self.each + self.margin) * self.span


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope | None:
    """None for too few points. Neighbours in time resemble each other, so that they count for fewer than they are: by
    the autocorrelation of what is left, as Bartlett 1935 does.
    """
    count = len(xs)
    mean_x, mean_y = sum(xs) / max(count, 1), sum(ys) / max(count, 1)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if count < 5 or not spread:
        return None
    each = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    left = [y - mean_y - each * (x - mean_x) for x, y in zip(xs, ys, strict=True)]
    squares = sum(one * one for one in left)
    if not squares:
        return Slope(each, 0.0, max(xs) - min(xs))
    alike = min(max(sum(a * b for a, b in pairwise(left)) / squares, 0.0), 0.95)
    free = max(count * (1 - alike) / (1 + alike) - 2, 1.0)
    return Slope(each, Z * math.sqrt(squares / count * count / free / spread), max(xs) - min(xs))
