"""Sizes for people who compare them with data sheets (GB) and with drivers (GiB)."""

from __future__ import annotations

_UNITS = ((3, "G"), (2, "M"), (1, "k"))


def decimal(count: float) -> str:
    """34359738368 -> "34.4 GB", 805306368 -> "0.805 GB"."""
    return _written(count, 1000, "B")


def binary(count: float) -> str:
    """805306368 -> "0.75 GiB"."""
    return _written(count, 1024, "iB").replace("k", "K")


def both(count: float) -> str:
    """805306368 -> "0.805 GB (0.75 GiB)"."""
    return f"{decimal(count)} ({binary(count)})"


def lasting(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 4e-8 -> "40 ns", 150 -> "2.5 min"."""
    if seconds >= 120:
        return f"{seconds / 60:,.3g} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def counted(number: float, noun: str) -> str:
    """(1, "request") -> "1 request", (2000, "request") -> "2,000 requests"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _written(count: float, base: int, unit: str) -> str:
    """In the largest unit of which it is a tenth at least: no one plans in terabytes."""
    for power, prefix in _UNITS:
        if abs(count) >= 0.1 * base**power:
            return f"{_digits(count / base**power)} {prefix}{unit}"
    return f"{count:.0f} B"


def _digits(number: float) -> str:
    """Three that matter."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
