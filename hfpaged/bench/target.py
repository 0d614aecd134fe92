"""What a figure has to reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIGNS = {">=": "least", "<=": "most", "<": "below"}
_WRITTEN = re.compile(r"(>=|<=|<) (-?[0-9.]+(?:e-?[0-9]+)?)(.*)")


@dataclass(frozen=True)
class Target:
    """At least `least`, at most `most` or below `below`: one of the three. A ratio, or a share in percent.

    `unit` stands behind what is neither.
    """

    least: float | None = None
    most: float | None = None
    below: float | None = None
    is_share: bool = False
    unit: str = "x"

    @classmethod
    def parse(cls, text: str) -> Target:
        """The target that `str` has written so. Raises ValueError for what it never writes."""
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no target; one is written as '>= 1.6x', '<= 45 %' or '< 2 ms'")
        sign, number, unit = found.groups()
        is_share = unit == " %"
        bound = {_SIGNS[sign]: float(number) / (100 if is_share else 1)}
        return cls(**bound, is_share=is_share, unit="x" if is_share else unit)

    @property
    def is_cost(self) -> bool:
        """Whether it bounds a part that is added to a whole, so that 1 % and 2 % are a point apart, not twofold."""
        return self.is_share and self.below is not None

    def is_met(self, value: float) -> bool:
        """Whether `value` (a share as a part of 1) is good enough."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    @property
    def bound(self) -> float:
        """The value that decides."""
        return next(bound for bound in (self.least, self.most, self.below) if bound is not None)

    def format(self, value: float) -> str:
        """`value` as this target counts: 0.45 is "45.0 %" or "0.45x"."""
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.2f}{self.unit}"

    def __str__(self) -> str:
        signs = ((">=", self.least), ("<=", self.most), ("<", self.below))
        sign, bound = next((sign, bound) for sign, bound in signs if bound is not None)
        return f"{sign} {100 * bound:g} %" if self.is_share else f"{sign} {bound:g}{self.unit}"
