"""Figures as people read them, and round numbers to advise."""

from __future__ import annotations

import math


def percent(share: float) -> str:
    """0.123 -> "12 %", and "0.4 %" where "0 %" would be none at all."""
    return f"{share:.1%}".replace("%", " %") if 0 < abs(share) < 0.01 else f"{share:.0%}".replace("%", " %")


def number(value: float) -> str:
    """1234567 -> "1,234,567", 4.25 -> "4.2"."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def plural(value: float, word: str) -> str:
    """1, "request" -> "1 request"."""
    return f"{number(value)} {word}{'' if value == 1 else 's'}"


def duration(seconds: float) -> str:
    """0.0042 -> "4.2 ms", 75 -> "75 s", 7200 -> "2.0 h"."""
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    if seconds < 600:
        return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def round_up(value: float) -> int:
    """To one of 4 steps per octave: 1, 2, ... 8, 10, 12, 14, 16, 20 ..."""
    step = _step(value)
    return math.ceil(value / step) * step


def round_down(value: float) -> int:
    """As `round_up`, to the step below; at least 1."""
    step = _step(value)
    return max(math.floor(value / step) * step, 1)


def _step(value: float) -> int:
    return int(2 ** max(math.floor(math.log2(value)) - 2, 0)) if value > 1 else 1
