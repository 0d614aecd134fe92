"""What one run of `hfpaged bench` comes to: a verdict, an exit code, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hfpaged.bench import comparison_report, figures_file, report
from hfpaged.bench.comparison import Comparison, compare
from hfpaged.bench.figures_file import Figures
from hfpaged.bench.result import Outcome, exit_code

THIS_RUN = "this run"
INTERRUPTED = 130


@dataclass(frozen=True)
class Conclusion:
    """The rows that were measured, how many were to be, and what has stopped it before the others. `old` is what it is
    compared with.
    """

    header: Mapping[str, Any]
    outcomes: Sequence[Outcome]
    planned: int
    stop: BaseException | None = None
    is_strict: bool = False
    old: Figures | None = None
    tolerance: float = 0.0

    @property
    def was_interrupted(self) -> bool:
        return isinstance(self.stop, KeyboardInterrupt)

    @property
    def exit_code(self) -> int:
        """A wrong token counts more than a row that regressed, and that more than a target."""
        if self.stop is not None:
            return INTERRUPTED if self.was_interrupted else 2
        own = exit_code(self.outcomes, self.is_strict)
        compared = 0 if self.comparison is None else self.comparison.exit_code
        return own if own == 1 else compared or own

    @cached_property
    def comparison(self) -> Comparison | None:
        """With `old`, of the rows that are done; None where they have none in common."""
        new = figures_file.from_record(THIS_RUN, report.as_json(self.header, self.outcomes, 0))
        if self.old is None or not new.rows.keys() & self.old.rows.keys():
            return None
        return compare(self.old, new, self.tolerance)

    @property
    def verdict(self) -> str:
        """One line."""
        parts = [report.verdict(self.outcomes)]
        if self.stop is not None:
            how = "Interrupted" if self.was_interrupted else "Stopped by an error"
            parts.insert(0, f"{how} after {len(self.outcomes)} of {self.planned} rows.")
        if self.comparison is not None:
            parts.append(comparison_report.sentence(self.comparison))
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Everything that is told."""
        compared = None if self.comparison is None else comparison_report.as_json(self.comparison)
        return {
            **report.as_json(self.header, self.outcomes, self.exit_code),
            "verdict": self.verdict,
            "interrupted": self.was_interrupted,
            "rows_planned": self.planned,
            "comparison": compared,
        }
