"""What a figure has to reach."""

from __future__ import annotations

from dataclasses import dataclass


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

    def is_met(self, value: float) -> bool:
        """Whether `value` (a share as a part of 1) is good enough."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def format(self, value: float) -> str:
        """`value` as this target counts: 0.45 is "45.0 %" or "0.45x"."""
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.2f}{self.unit}"

    def __str__(self) -> str:
        signs = ((">=", self.least), ("<=", self.most), ("<", self.below))
        sign, bound = next((sign, bound) for sign, bound in signs if bound is not None)
        return f"{sign} {100 * bound:g} %" if self.is_share else f"{sign} {bound:g}{self.unit}"
