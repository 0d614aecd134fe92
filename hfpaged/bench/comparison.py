"""Two measurements of the same thing, an old one and a new one: what became better, and what REGRESSED.

A row has changed where the new value is beyond both the tolerance and the spreads of both sides:

    old     |----o----|                       |----o----|
    new              |----n----|                             |----n----|
            the same: spreads overlap         better, or REGRESSED

Ratios change in percent of the old one. A cost, a part that is added to a whole, changes in points of that whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import PurePath
from typing import Any

from hfpaged.bench.figures_file import Figure, Figures
from hfpaged.errors import InvalidConfigError

TOLERANCE = 0.05
MUST_AGREE = ("kind", "parameters", "dtype", "device", "threads", "rate", "quick")
TOLD = ("cpu", "kernels", "torch", "transformers", "hfpaged", "repeats", "against")


class Finding(Enum):
    """What became of a row."""

    BETTER = "better"
    SAME = "same"
    REGRESSED = "REGRESSED"
    VOID = "void"


@dataclass(frozen=True)
class Change:
    """One row of both; `worse` is how much worse it is now: a part of the old value, or of a whole for a cost."""

    old: Figure
    new: Figure
    finding: Finding
    worse: float | None = None
    reason: str = ""

    @property
    def size(self) -> str:
        """As in "12.3 %" or "1.2 points"."""
        assert self.worse is not None
        return f"{100 * abs(self.worse):.1f} {'points' if self.new.counts.is_cost else '%'}"


@dataclass(frozen=True)
class Comparison:
    """`told` are differences of the two that do not forbid to compare them."""

    old: Figures
    new: Figures
    tolerance: float
    changes: Sequence[Change]
    told: Sequence[str]

    @property
    def is_judged(self) -> bool:
        """Figures of quick runs are there to see that it runs."""
        return not self.new.header.get("quick")

    def those(self, finding: Finding) -> list[Change]:
        return [change for change in self.changes if change.finding is finding]

    @property
    def exit_code(self) -> int:
        """1 where tokens differed, 4 where a row has regressed, 2 where no row can be compared, else 0."""
        if self.wrong:
            return 1
        if not self.is_judged:
            return 0
        if len(self.those(Finding.VOID)) == len(self.changes):
            return 2
        return 4 if self.those(Finding.REGRESSED) else 0

    @property
    def wrong(self) -> list[str]:
        """As in "prefill (old.json)": rows whose tokens differed."""
        return [f"{name} ({figures.source})" for figures in (self.old, self.new) for name in figures.wrong]


def compare(old: Figures, new: Figures, tolerance: float = TOLERANCE) -> Comparison:
    """Raises InvalidConfigError where the two have no row in common, or nothing of them can be compared."""
    check(old, new.source, new.header, new.rows)
    changes = [_change(old.rows[name], new.rows[name], tolerance) for name in new.rows if name in old.rows]
    if new.header.get("quick"):
        changes = [replace(change, finding=Finding.VOID, reason=change.reason or "quick") for change in changes]
    return Comparison(old, new, tolerance, changes, _told(old, new))


def check(old: Figures, source: str, header: Mapping[str, Any], rows: Collection[str]) -> None:
    """Raises InvalidConfigError where a run with `header` and `rows`, named `source`, is of something else than it."""
    pairs = [("model", _model(old.header), _model(header))]
    pairs += [(name, old.header.get(name), header.get(name)) for name in MUST_AGREE]
    other = [f"{name} {a} and {b}" for name, a, b in pairs if a is not None and b is not None and a != b]
    if other:
        raise InvalidConfigError(
            f"{old.source} and {source} are of different things, so that nothing can be compared: {', '.join(other)}; "
            "measure both in the same way"
        )
    if not old.rows.keys() & set(rows):
        raise InvalidConfigError(
            f"{old.source} and {source} have no row in common: the one has {_names(old.rows)}, the other "
            f"{_names(rows)}; compare two runs of one kind"
        )


def _model(header: Mapping[str, Any]) -> str | None:
    """The last part of a path: a model is the same in another folder."""
    name = header.get("model")
    return None if name is None else PurePath(str(name)).name


def _told(old: Figures, new: Figures) -> list[str]:
    told = [
        f"{name}: {old.header[name]} in {old.source}, {new.header[name]} in {new.source}"
        for name in TOLD
        if name in old.header and name in new.header and old.header[name] != new.header[name]
    ]
    for one, other in ((old, new), (new, old)):
        alone = [name for name in one.rows if name not in other.rows]
        told += [f"only in {one.source}: {', '.join(alone)}"] if alone else []
    return told


def _names(rows: Collection[str]) -> str:
    return ", ".join(rows) or "none"


def _change(old: Figure, new: Figure, tolerance: float) -> Change:
    reason = _obstacle(old, new)
    if reason:
        return Change(old, new, Finding.VOID, reason=reason)
    worse = _worse(old, new)
    if abs(worse) <= tolerance:
        return Change(old, new, Finding.SAME, worse, f"within {100 * tolerance:g} %")
    if old.low <= new.high and new.low <= old.high:
        return Change(old, new, Finding.SAME, worse, "within the spread")
    few = "timed once: noise is not known" if len(old.values) <= 1 == len(new.values) else ""  # a count has no turns
    return Change(old, new, Finding.REGRESSED if worse > 0 else Finding.BETTER, worse, few)


def _obstacle(old: Figure, new: Figure) -> str:
    """Why nothing can be said of this row."""
    if old.is_wrong or new.is_wrong:
        return "tokens differed"
    if old.value is None or new.value is None:
        return "not measured in both"
    if old.shape != new.shape:
        return "other sizes"
    if bool(old.rival) != bool(new.rival):
        return f"over {old.rival or 'transformers'}, now over {new.rival or 'transformers'}"
    return "it is not known which way is better" if new.is_more_better is None else ""


def _worse(old: Figure, new: Figure) -> float:
    assert old.value is not None
    assert new.value is not None
    difference = old.value - new.value if new.is_more_better else new.value - old.value
    whole = 1.0 if new.counts.is_cost or old.value == 0 else abs(old.value)
    return difference / whole
