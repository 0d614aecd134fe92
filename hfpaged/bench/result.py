"""What measuring a row gives, and how it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hfpaged.bench.catalog import Row
from hfpaged.bench.shape import Shape


@dataclass(frozen=True)
class Measured:
    """`value` is compared with the row's target; `plain` and `paged`, in `unit`, are what it was made of.

    `same_tokens` is None where no tokens were compared. `values` has the value of each turn, and `plain_runs` and
    `paged_runs` the amounts that it was made of; a row that was run once, or that counts what never varies, has none.
    `difference` says how tokens differ, and is shown where nothing else is. `rival` is the URL of the server that the
    row was measured against, "" where that was transformers.
    """

    value: float | None
    plain: float | None = None
    paged: float | None = None
    unit: str = ""
    same_tokens: bool | None = None
    note: str = ""
    plain_runs: tuple[float, ...] = ()
    paged_runs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    difference: str = ""
    rival: str = ""

    @property
    def runs(self) -> int:
        """How many turns the value is the median of; 0 where nothing was measured."""
        return 0 if self.value is None else max(len(self.values), 1)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The least and the greatest value of all turns, None for a single one."""
        return (min(self.values), max(self.values)) if self.runs > 1 else None


@dataclass(frozen=True)
class Outcome:
    """One row, measured in `shape`. `is_judged` is False for sizes too small to mean anything."""

    row: Row
    shape: Shape
    measured: Measured
    is_judged: bool = True

    @property
    def is_met(self) -> bool | None:
        """Whether the target was reached; None where nothing is judged."""
        value, target = self.measured.value, self.row.target
        return None if value is None or target is None or not self.is_judged else target.is_met(value)

    @property
    def counts_tokens(self) -> bool:
        """Whether the value is itself the share of equal rows."""
        return self.row.module == "tokens"

    def withheld(self) -> Outcome:
        """The same without figures, for a comparison that is void."""
        was = self.measured
        left = Measured(None, same_tokens=was.same_tokens, note=was.difference, rival=was.rival)
        return replace(self, measured=left)


def published(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """What may be shown: once tokens differ anywhere, only the share of equal rows. A wrong answer has no speed.

    Where another server's texts differ, it is all rows with that server that have none: it may be another model, of
    which what was compared with transformers knows nothing.
    """
    wrong = {outcome.measured.rival for outcome in outcomes if outcome.measured.same_tokens is False}
    return [
        outcome.withheld() if ("" in wrong and not outcome.counts_tokens) or outcome.measured.rival in wrong - {""}
        else outcome
        for outcome in outcomes
    ]  # fmt: skip


def differing(outcomes: Sequence[Outcome]) -> list[str]:
    """The rows whose tokens were not those of the other side."""
    return [outcome.row.name for outcome in outcomes if outcome.measured.same_tokens is False]


def missed(outcomes: Sequence[Outcome]) -> list[str]:
    """The rows that did not reach their target."""
    return [outcome.row.name for outcome in outcomes if outcome.is_met is False]


def exit_code(outcomes: Sequence[Outcome], is_strict: bool) -> int:
    """1 when tokens differ, 3 for a missed target where that counts, else 0."""
    if differing(outcomes):
        return 1
    return 3 if is_strict and missed(outcomes) else 0
