"""Which formats are fit, in words and as an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfpaged.quality.figures import Figures
from hfpaged.quality.limits import Miss, percent
from hfpaged.quality.thresholds import DEMO_TARGETS, Thresholds, worst

UNFIT = 3  # as `hfpaged bench` exits for a target that was missed


@dataclass(frozen=True)
class Judged:
    """Figures with what they miss of the thresholds, and of this project's own target where there is one: None else."""

    figures: Figures
    misses: list[Miss]
    target: str | None
    target_missed: list[str] | None

    @property
    def is_fit(self) -> bool:
        return not self.misses


def judge(figures: Figures, thresholds: Thresholds, is_demo: bool) -> Judged:
    """`is_demo`: the model is the one that the targets are for."""
    target = DEMO_TARGETS.get(figures.format) if is_demo else None
    return Judged(
        figures,
        thresholds.misses(figures),
        None if target is None else str(target),
        None if target is None else target.missed(figures),
    )


def sentence(judged: Sequence[Judged]) -> str:
    """One clause for each format, in the order in which they were given."""
    clauses = [_clause([one for one in judged if one.figures.format == name]) for name in _formats(judged)]
    return f"{'; '.join(clauses)}."


def exit_code(judged: Sequence[Judged]) -> int:
    """0 when every format is fit at every length."""
    return 0 if all(one.is_fit for one in judged) else UNFIT


def _formats(judged: Sequence[Judged]) -> list[str]:
    return list(dict.fromkeys(one.figures.format for one in judged))


def _clause(judged: Sequence[Judged]) -> str:
    name = judged[0].figures.format
    unfit = [f"{reason} ({one.figures.context.name})" for one in judged for reason in one.misses]
    if unfit:
        return f"{name} is not fit for this model: {', '.join(unfit)}"
    change, kl, top1 = worst([one.figures for one in judged])
    at_worst = "" if len(judged) == 1 else "at worst "
    return (
        f"{name} is fit for this model: {at_worst}perplexity {percent(change)}, KL {kl:.2g}, top-1 {100 * top1:.1f} %, "
        f"in {100 * judged[0].figures.of_native:.0f} % of the native bytes"
    )
