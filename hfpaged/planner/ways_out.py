"""What to do where a workload does not fit: each way is planned again with it, and ranked by its price."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import Case
from hfpaged.planner.change import Change, Maker
from hfpaged.planner.changes import CHANGES
from hfpaged.planner.elsewhere import ELSEWHERE
from hfpaged.planner.fit import Fit, fit

# Of pairs, the cheapest: there are many that would do.
MOST_PAIRS = 3


@dataclass(frozen=True)
class WayOut:
    """One change, or two, after which it fits: `fit` is the plan with them. `price` is about the share of what was
    asked that they give up, `costs` says it in words.
    """

    changes: tuple[Change, ...]
    fit: Fit

    @property
    def title(self) -> str:
        return ", and ".join(change.title for change in self.changes)

    @property
    def costs(self) -> str:
        return "; ".join(change.costs for change in self.changes)

    @property
    def price(self) -> float:
        return sum(change.price for change in self.changes)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(change.kind for change in self.changes)

    @property
    def same_tokens(self) -> bool:
        """Whether what fits is answered as it would be without."""
        return all(change.same_tokens for change in self.changes)

    @property
    def is_served(self) -> bool:
        """Whether `hfpaged serve` can be told to do so on the same machine."""
        return all(change.is_served for change in self.changes)


def ways_out(found: Fit) -> list[WayOut]:
    """Those that work, the cheapest first: single changes, and pairs of changes that are cheaper than each of the two
    alone, or of which neither is enough alone. None where it fits as it is.
    """
    if found.fits:
        return []
    tried = [(change, _planned(change.case)) for change in _changes(found, CHANGES)]
    alone = [WayOut((change,), better) for change, better in tried if better is not None and better.fits]
    halfway = [(change, better) for change, better in tried if better is not None and not better.fits]
    price = {way.changes[0].kind: way.price for way in sorted(alone, key=lambda way: -way.price)}
    here = [change for change in CHANGES if change not in ELSEWHERE]
    pairs = [way for way in _pairs(halfway, here) if all(way.price < price.get(kind, math.inf) for kind in way.kinds)]
    ways = [*alone, *pairs[:MOST_PAIRS]] or _pairs(halfway, ELSEWHERE)[:MOST_PAIRS]
    return sorted(ways, key=lambda way: way.price)


def _pairs(halfway: Iterable[tuple[Change, Fit]], makers: Iterable[Maker]) -> list[WayOut]:
    """Of each two kinds of changes the cheapest pair; `makers` make the second ones."""
    found: dict[frozenset[str], WayOut] = {}
    for first, fit_of_first in halfway:
        for second in _changes(fit_of_first, makers):
            better = _planned(second.case) if second.kind != first.kind else None
            if better is not None and better.fits:
                way = WayOut((first, second), better)
                found[way.kinds] = min(way, found.get(way.kinds, way), key=lambda way: way.price)
    return sorted(found.values(), key=lambda way: way.price)


def _changes(found: Fit, makers: Iterable[Maker]) -> Iterator[Change]:
    for maker in makers:
        yield from maker(found)


def _planned(case: Case) -> Fit | None:
    """None where the model cannot take the choices: a format that needs other head sizes, say."""
    try:
        return fit(case)
    except InvalidConfigError:
        return None
