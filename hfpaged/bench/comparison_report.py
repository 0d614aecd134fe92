"""A comparison as a table, as one sentence, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from hfpaged.bench.comparison import Change, Comparison, Finding
from hfpaged.bench.figures_file import Figure


def table(comparison: Comparison) -> Table:
    """One line for each row that both have."""
    old, new = comparison.old.source, comparison.new.source
    result = Table(title=escape(f"{old} and {new}"), title_justify="left")
    result.add_column("row", no_wrap=True)
    result.add_column("what")
    for name in ("old", "spread", "new", "spread", "change"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("finding", no_wrap=True)
    result.add_column("why")
    for change in comparison.changes:
        cells = (change.new.name, change.new.what, *_value(change.old), *_value(change.new), _size(change))
        result.add_row(*map(escape, (*cells, change.finding.value, change.reason)))
    return result


def _value(figure: Figure) -> tuple[str, str]:
    if figure.value is None:
        return "-", ""
    write = figure.counts.format
    several = len(figure.values) > 1
    return write(figure.value), f"{write(figure.low)} to {write(figure.high)}" if several else "n=1"


def _size(change: Change) -> str:
    if change.worse is None:
        return "-"
    return f"{change.size} {'worse' if change.worse > 0 else 'better'}" if change.worse else "none"


def sentence(comparison: Comparison) -> str:
    """The verdict: tokens first, for a wrong answer has no speed that could be compared."""
    if comparison.wrong:
        return f"The tokens differed in {', '.join(comparison.wrong)}, so that nothing is compared."
    counts = {finding: len(comparison.those(finding)) for finding in Finding}
    told = [
        f"{counts[finding]} {word}"
        for finding, word in ((Finding.BETTER, "better"), (Finding.SAME, "the same"), (Finding.VOID, "not comparable"))
        if counts[finding]
    ]
    if not comparison.is_judged:
        return f"The sizes of quick runs are too small to judge what became of {comparison.old.source}."
    if counts[Finding.VOID] == len(comparison.changes):
        reasons = sorted({change.reason for change in comparison.changes})
        return f"No row can be compared with {comparison.old.source}: {', '.join(reasons)}."
    regressed = [f"{change.new.name} by {change.size}" for change in comparison.those(Finding.REGRESSED)]
    if regressed:
        rest = f"; {', '.join(told)}" if told else ""
        return f"REGRESSED against {comparison.old.source}: {', '.join(regressed)}{rest}."
    return f"No regression against {comparison.old.source}: {', '.join(told)}."


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All that the table and the lines around it say."""
    return {
        "old": comparison.old.source,
        "new": comparison.new.source,
        "tolerance": comparison.tolerance,
        "told": list(comparison.told),
        "verdict": sentence(comparison),
        "exit_code": comparison.exit_code,
        "rows": [
            {
                "name": change.new.name,
                "old": change.old.value,
                "new": change.new.value,
                "worse": change.worse,
                "counted_in": "points" if change.new.counts.is_cost else "part of the old value",
                "finding": change.finding.value,
                "reason": change.reason,
            }
            for change in comparison.changes
        ],
    }
