"""The outcomes as a table, as one sentence and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from hfpaged.bench.result import Measured, Outcome, differing, missed, published

MARKS = {True: "met", False: "MISSED", None: ""}
NONE_JUDGED = "none that has a target was measured"


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line for each row; a value is hfpaged over transformers unless its row says otherwise."""
    rivals = sorted({outcome.measured.rival for outcome in outcomes} - {""})
    title = f"{' or '.join(['Plain transformers', *rivals])} and hfpaged"
    result = Table(title=escape(title), title_justify="left")
    result.add_column("row", no_wrap=True)
    result.add_column("what")
    for name in ("other side" if rivals else "transformers", "hfpaged", "result", "spread", "target"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("")
    result.add_column("note")
    for outcome in published(outcomes):
        result.add_row(*map(escape, _cells(outcome)))  # a note may quote a model, which says [/INST] for one
    return result


def _cells(outcome: Outcome) -> tuple[str, ...]:
    row, measured = outcome.row, outcome.measured
    return (
        row.name,
        row.describe(outcome.shape),
        _amount(measured.plain, measured.unit),
        _amount(measured.paged, measured.unit),
        _value(outcome),
        spread(outcome),
        _target(outcome),
        MARKS[outcome.is_met],
        measured.note,
    )


def _value(outcome: Outcome) -> str:
    measured: Measured = outcome.measured
    if measured.value is not None:
        return outcome.row.format(measured.value)
    return "tokens differ" if measured.same_tokens is False else "-"


def spread(outcome: Outcome) -> str:
    """The least and the greatest value of all turns, and how many turns there were."""
    measured = outcome.measured
    if measured.spread is None:
        return "n=1" if measured.runs else ""
    low, high = map(outcome.row.format, measured.spread)
    return f"{low} to {high}, n={measured.runs}"


def _target(outcome: Outcome) -> str:
    if outcome.row.target is None:
        return "-"
    return str(outcome.row.target) if outcome.is_judged else "quick"


def _amount(amount: float | None, unit: str) -> str:
    return "" if amount is None else f"{amount:.1f} {unit}"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """One sentence: tokens first, for without them nothing else counts."""
    own = [outcome for outcome in outcomes if not outcome.measured.rival]
    elsewhere = [outcome for outcome in outcomes if outcome.measured.rival]
    wrong = differing(own)
    if wrong:
        return f"The tokens differ in {', '.join(wrong)}, so speed and memory are not compared."
    same = {"plain transformers": any(outcome.measured.same_tokens for outcome in own)}
    told = ""
    if elsewhere:
        rival, rows = elsewhere[0].measured.rival, ", ".join(differing(elsewhere))
        same[rival] = not rows
        told = f"The texts of {rival} differ in {rows}, so that nothing is compared with it. " if rows else ""
    names = [name for name, is_same in same.items() if is_same]
    if told and not own:
        return told.rstrip()
    tokens = f"Same tokens as {' and '.join(names)}" if names else f"No {'other ' if told else ''}row compares tokens"
    return f"{told}{tokens}; {_targets(published(outcomes))}."


def _targets(outcomes: Sequence[Outcome]) -> str:
    """How many are met."""
    short, judged = missed(outcomes), sum(outcome.is_met is not None for outcome in outcomes)
    if not judged:
        is_quick = not all(outcome.is_judged for outcome in outcomes)
        return "the sizes of a quick run are too small to judge speed and memory" if is_quick else NONE_JUDGED
    if not short:
        return f"{judged} of {judged} targets met"
    return f"{judged - len(short)} of {judged} targets met, missed: {', '.join(short)}"


def as_json(header: Mapping[str, Any], outcomes: Sequence[Outcome], code: int) -> dict[str, Any]:
    """Everything that the table says, and the exit code."""
    return {
        "header": dict(header),
        "tokens_agree": not differing(outcomes),
        "verdict": verdict(outcomes),
        "exit_code": code,
        "rows": [_record(outcome) for outcome in published(outcomes)],
    }


def _record(outcome: Outcome) -> dict[str, Any]:
    row = outcome.row
    return {
        "name": row.name,
        "what": row.describe(outcome.shape),
        "shape": asdict(outcome.shape),
        "target": None if row.target is None else str(row.target),
        "better": "more" if row.is_more_better else "less",
        "met": outcome.is_met,
        "n": outcome.measured.runs,
        "spread": outcome.measured.spread,
        **asdict(outcome.measured),
    }
