"""What the doctor has found: sentences, the most important ones first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

# "problem": requests fail, wait or are computed again for it. "advice": it would be better otherwise. "note": nothing
# is wrong, it explains what is seen.
Severity = Literal["problem", "advice", "note"]
# Metrics that are not there and are told each.
SHOWN = 4
ORDER: tuple[Severity, ...] = ("problem", "advice", "note")


@dataclass(frozen=True)
class Finding:
    """`title` says what is wrong, `evidence` by which figures it is known, `remedy` what to change; `rule` found it."""

    severity: Severity
    title: str
    evidence: str
    remedy: str
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.severity.upper()}: {self.title}\n  because {self.evidence}\n  remedy  {self.remedy}"


class Diagnosis(list[Finding]):
    """What is to be changed, most important first: empty when all is well. str() is for people.

    model_name  whose
    summary     the main figures, in words
    notes       what is seen and no fault
    not_judged  metrics that were not there, by the rule that needs them
    is_sure     whether enough requests have ended to judge
    """

    def __init__(
        self, found: Iterable[Finding], *, model_name: str = "", summary: Mapping[str, str] | None = None,
        figures: Mapping[str, float] | None = None, not_judged: Mapping[str, str] | None = None, is_sure: bool = True,
    ) -> None:  # fmt: skip
        ordered = sorted(found, key=lambda finding: ORDER.index(finding.severity))
        super().__init__(finding for finding in ordered if finding.severity != "note")
        self.notes = [finding for finding in ordered if finding.severity == "note"]
        self.model_name = model_name
        self.summary, self.figures, self.not_judged = dict(summary or {}), dict(figures or {}), dict(not_judged or {})
        self.is_sure = is_sure

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self if finding.severity == "problem"]

    @property
    def verdict(self) -> str:
        """One line."""
        if not self:
            return "all is well" if self.is_sure else "nothing is found, but too few requests have ended to judge"
        advices = len(self) - len(self.problems)
        counts = [(len(self.problems), "problem", "problems"), (advices, "piece of advice", "pieces of advice")]
        return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts if count)

    def __str__(self) -> str:
        head = f"{self.model_name}: {self.verdict}" if self.model_name else self.verdict
        figures = "".join(f"\n  {name}: {text}" for name, text in self.summary.items())
        lacking = [self.missing] if self.not_judged else []
        return "\n\n".join([head + figures, *map(str, [*self, *self.notes]), *lacking])

    @property
    def missing(self) -> str:
        """What was not judged, and what is not there for it."""
        rules: dict[str, list[str]] = {}
        for rule, name in self.not_judged.items():
            rules.setdefault(name, []).append(rule)
        if len(rules) > SHOWN:
            few = ", ".join(list(rules)[: SHOWN - 1])
            more = len(rules) - SHOWN + 1
            return f"not judged: {len(self.not_judged)} rules, as {few} and {more} more metrics they need are not there"
        told = "; ".join(f"{', '.join(names)} (lacks {name})" for name, names in rules.items())
        return f"not judged: {told}" if told else ""
