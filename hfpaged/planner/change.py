"""A change to what was asked, after which it may fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hfpaged.planner.case import Case
from hfpaged.planner.fit import Fit


@dataclass(frozen=True)
class Change:
    """`case` is what is asked then. `is_served`: `hfpaged serve` has a flag for it; `same_tokens`: what fits is
    answered as before. Two of one `kind` exclude each other.
    """

    kind: str
    title: str
    costs: str
    price: float
    case: Case
    is_served: bool = True
    same_machine: bool = True
    same_tokens: bool = True


Maker = Callable[[Fit], Iterator[Change]]
