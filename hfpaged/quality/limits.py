"""The figures that can decide whether a format is fit, and how limits for them are written: ppl=0.5%,top1=98%."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hfpaged.quality.figures import Figures


def percent(change: float) -> str:
    """A change with its sign: 0.0012 is "+0.12 %"."""
    return f"{100 * change:+.2f} %"


def points(difference: float) -> str:
    """A difference of two shares: 0.012 is "1.20 points"."""
    return f"{100 * difference:.2f} points"


class Limit(NamedTuple):
    """A figure with a limit. `is_most`: it may be so large at most, else so small at least. `figure` is its name in
    Figures, `threshold` the one in Thresholds, `error` that of its standard error, "" where there is none. `is_share`:
    a part of 1 that is written in percent, and lies between `lowest` and `highest`.
    """

    name: str
    words: str
    figure: str
    threshold: str
    is_most: bool
    is_share: bool
    lowest: float
    highest: float
    as_value: Callable[[float], str]
    as_limit: Callable[[float], str]
    as_distance: Callable[[float], str]
    error: str = ""

    @property
    def direction(self) -> str:
        """ "most" or "least"."""
        return "most" if self.is_most else "least"

    def is_kept(self, value: float, limit: float) -> bool:
        """A figure that is no number keeps none."""
        return value <= limit if self.is_most else value >= limit


LIMITS = (
    Limit(
        "ppl", "perplexity", "ppl_change", "max_ppl_change", True, True, -1.0, math.inf, percent, percent, points,
        "ppl_error",
    ),
    Limit(
        "kl", "KL", "kl_mean", "max_kl", True, False, 0.0, math.inf,
        "{:.2g}".format, "{:g}".format, "{:.2g}".format,
    ),
    Limit(
        "top1", "top-1", "top1", "min_top1", False, True, 0.0, 1.0,
        lambda value: f"{100 * value:.1f} %", lambda value: f"{100 * value:g} %", points,
    ),
    Limit(
        "rouge", "ROUGE-L", "rouge_l", "min_rouge_l", False, True, 0.0, 1.0,
        lambda value: f"{100 * value:.1f} %", lambda value: f"{100 * value:g} %", points,
    ),
)  # fmt: skip
BY_NAME = {limit.name: limit for limit in LIMITS}


class Miss(NamedTuple):
    """A figure beyond its limit, both in the units of Figures; `error` is the figure's standard error, NaN if there is
    none to say.
    """

    kind: Limit
    value: float
    limit: float
    error: float

    @property
    def by(self) -> float:
        """How far beyond; NaN for a figure that is no number."""
        return abs(self.value - self.limit)

    @property
    def is_within_error(self) -> bool:
        """Whether as much could come by chance."""
        return self.by <= self.error

    def as_json(self) -> dict[str, float | str | bool | None]:
        """A figure that is no number is null."""
        return {
            "name": self.kind.name,
            "figure": self.kind.figure,
            "direction": self.kind.direction,
            "value": _finite(self.value),
            "limit": self.limit,
            "by": _finite(self.by),
            "standard_error": _finite(self.error),
            "within_standard_error": self.is_within_error,
        }

    def __str__(self) -> str:
        side = "above" if self.kind.is_most else "below"
        told = f"{self.kind.words} {self.kind.as_value(self.value)} is {side} {self.kind.as_limit(self.limit)}"
        if math.isfinite(self.by):
            told += f" by {self.kind.as_distance(self.by)}"
        if self.is_within_error:
            told += f", within its standard error of {self.kind.as_distance(self.error)}: more --texts tell"
        return told


def missed(kind: Limit, limit: float | None, figures: Figures) -> Miss | None:
    """None where the limit is kept, or there is none."""
    value = getattr(figures, kind.figure)
    if limit is None or kind.is_kept(value, limit):
        return None
    return Miss(kind, value, limit, getattr(figures, kind.error) if kind.error else math.nan)


def parse_limits(text: str) -> dict[str, float]:
    """ "ppl=0.5%,top1=98%" by the names of Thresholds. Raises argparse.ArgumentTypeError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        kind = BY_NAME.get(name)
        if kind is None:
            known = ", ".join(f"{one.name} (at {one.direction})" for one in LIMITS)
            raise argparse.ArgumentTypeError(f"{part.strip()!r} names no figure; write NAME=LIMIT with one of {known}")
        if kind.threshold in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice; give it one limit")
        found[kind.threshold] = _limit(kind, value)
    return found


def share(text: str) -> float:
    """ "0.5%" as a part of 1. The sign must be there: 0.93 could mean either."""
    number = text.strip().removesuffix("%")
    try:
        found = float(number) / 100
        if number == text.strip() or not math.isfinite(found):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share; write a percentage with its sign, such as 0.5%"
        ) from None
    return found


def _limit(kind: Limit, text: str) -> float:
    try:
        found = share(text) if kind.is_share else float(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{kind.name}={text}: {error}{_readings(text)}") from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{kind.name}={text}: {text!r} is no number; write nats, as kl=0.01") from None
    if not (kind.lowest <= found <= kind.highest and math.isfinite(found)):
        scale, sign = (100, "%") if kind.is_share else (1, "")
        top = f"{scale * kind.highest:g}{sign}" if math.isfinite(kind.highest) else "any finite number"
        raise argparse.ArgumentTypeError(
            f"{kind.name}={text} is out of range; {kind.words} lies between {scale * kind.lowest:g}{sign} and {top}"
        )
    return found


def _readings(text: str) -> str:
    """What a number without its sign could have meant."""
    try:
        number = float(text)
    except ValueError:
        return ""
    return f" ({text} could be {number:g}% or {100 * number:g}%)" if math.isfinite(number) else ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
