"""What runs of sides that take turns come to: medians, with the least and the greatest of all pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from hfpaged.bench.result import Measured


def ratio(plain: float, paged: float) -> float:
    """How many times as much hfpaged has."""
    return paged / plain


def in_pairs(
    plain: Sequence[float], paged: Sequence[float], unit: str, same_tokens: bool | None, note: str = "",
    of: Callable[[float, float], float] = ratio,
) -> Measured:  # fmt: skip
    """Amounts of both sides by turn. The value is made of their medians, and the spread of the pairs.

    A ratio of medians is never beyond the least and the greatest ratio of the pairs: where each amount of one side is
    at least m times that of the other, so is its median.
    """
    slow, fast = statistics.median(plain), statistics.median(paged)
    values = tuple(of(*pair) for pair in zip(plain, paged, strict=True))
    return Measured(of(slow, fast), slow, fast, unit, same_tokens, note, tuple(plain), tuple(paged), values)


def in_a_row(values: Sequence[float], same_tokens: bool | None = None, note: str = "") -> Measured:
    """The median of what each turn gave, where there are no amounts of two sides to be told."""
    return Measured(statistics.median(values), same_tokens=same_tokens, note=note, values=tuple(values))
