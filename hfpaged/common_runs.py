"""What two lists of numbers have in common: their beginning, and the long runs that stand in both in the same order."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

# Shorter runs are words that any two texts share.
LONG = 16


def common_length(first: array[int], second: array[int]) -> int:
    """How many numbers two arrays have in common at their beginning."""
    limit = min(len(first), len(second))
    low, high = 0, limit + 1  # first[:low] is equal; first[:high] is not, or does not exist
    if first[:limit] == second[:limit]:
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Run(NamedTuple):
    """`length` numbers from `first_start` on in one list equal those from `second_start` on in the other."""

    first_start: int
    second_start: int
    length: int


def long_runs(first: array[int], second: array[int]) -> list[Run]:
    """Runs of at least LONG numbers, in order; the time is linear where few of them repeat.

    A run is looked up by its first LONG numbers, at the first place behind the run before it.
    """
    places: dict[bytes, list[int]] = {}
    for start in range(len(second) - LONG + 1):
        places.setdefault(second[start : start + LONG].tobytes(), []).append(start)
    found: list[Run] = []
    at = behind = 0
    while at + LONG <= len(first):
        known = places.get(first[at : at + LONG].tobytes(), [])
        index = bisect_left(known, behind)
        if index == len(known):
            at += 1
            continue
        run = Run(at, known[index], common_length(first[at:], second[known[index] :]))
        found.append(run)
        at, behind = run.first_start + run.length, run.second_start + run.length
    return found
