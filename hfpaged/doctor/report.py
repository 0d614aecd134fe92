"""A diagnosis for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hfpaged.doctor.findings import Diagnosis, Finding

COLOURS = {"problem": "bold red", "advice": "bold yellow", "note": "bold"}


def show(console: Console, diagnosis: Diagnosis) -> None:
    """The figures, then each finding with why and what to do."""
    console.print(Text(f"{diagnosis.model_name or 'hfpaged'}: {diagnosis.verdict}", style="bold"))
    console.print(Padding(_table(diagnosis.summary.items()), (0, 0, 1, 2), expand=False))
    for finding in [*diagnosis, *diagnosis.notes]:
        _show(console, finding)
    if diagnosis.missing:
        console.print(Text(f"{diagnosis.missing}\n", style="dim"))


def _show(console: Console, finding: Finding) -> None:
    style = COLOURS[finding.severity]
    console.print(Text.assemble((finding.severity.upper(), style), "  ", (finding.title, "bold")))
    rows = (("because", finding.evidence), ("remedy", finding.remedy))
    console.print(Padding(_table(rows), (0, 0, 1, 2), expand=False))


def _table(rows: Any) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(Text(name), Text(text))
    return grid


def as_json(source: str, interval: float | None, diagnoses: Sequence[Diagnosis], code: int) -> dict[str, Any]:
    """Everything that the report says, and the exit code."""
    return {
        "source": source,
        "interval": interval,
        "models": [_record(diagnosis) for diagnosis in diagnoses],
        "exit_code": code,
    }


def _record(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "model_name": diagnosis.model_name,
        "verdict": diagnosis.verdict,
        "figures": diagnosis.figures,
        "findings": [asdict(finding) for finding in diagnosis],
        "notes": [asdict(finding) for finding in diagnosis.notes],
        "not_judged": diagnosis.not_judged,
    }
