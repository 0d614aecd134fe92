"""The results as a PNG: a bar for each row with its spread, and a line where its target is.

Ratios, shares and milliseconds have a panel each, as they have no scale in common.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from hfpaged.bench.conclusion import Conclusion
from hfpaged.bench.result import Outcome, published
from hfpaged.bench.target import Target
from hfpaged.picture import new_figure, save

MET, MISSED, NOT_JUDGED, TARGET = "#2a9d5c", "#c8382e", "#7a8594", "#1b1f24"
AXES = {"x": "ratio, hfpaged over the other side", "%": "share, %", "ms": "milliseconds"}
ROW, REST = 0.38, 1.5  # inches: one bar, and what stands above and below the bars of a panel
LETTERS = 110  # of a line of the title


def draw(path: str, found: Conclusion) -> None:
    """Write the plot; rows without a figure are left out."""
    panels = _panels(published(found.outcomes))
    heights = [ROW * len(bars) + REST for bars in panels.values()] or [REST]
    figure = new_figure(9, sum(heights))
    figure.suptitle(_title(found), fontsize=9, parse_math=False)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (unit, bars) in zip(axes, panels.items(), strict=False):
        _draw_panel(panel, unit, bars)
    if not panels:
        axes[0].axis("off")
    save(figure, path)


def _title(found: Conclusion) -> str:
    header = found.header
    place = f"{header['model']}, {header['dtype']}, {header['device']}, threads: {header['threads']}"
    return "\n".join([place, *textwrap.wrap(found.verdict, LETTERS)])


def _panels(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The rows that have a figure, by unit, in the order of the table."""
    panels: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.measured.value is not None:
            panels.setdefault(_unit(outcome.row.target or Target()), []).append(outcome)
    return panels


def _unit(target: Target) -> str:
    return "%" if target.is_share else target.unit.strip()


def _draw_panel(panel: Any, unit: str, bars: Sequence[Outcome]) -> None:
    scale = 100.0 if unit == "%" else 1.0
    places = range(len(bars))
    values = [scale * (outcome.measured.value or 0.0) for outcome in bars]
    colors = [{True: MET, False: MISSED, None: NOT_JUDGED}[outcome.is_met] for outcome in bars]
    panel.barh(places, values, color=colors, height=0.62)
    for place, outcome, value in zip(places, bars, values, strict=True):
        low, high = outcome.measured.spread or (value / scale, value / scale)
        panel.plot([scale * low, scale * high], [place, place], color=TARGET, linewidth=1.2, marker="|", markersize=7)
        if outcome.row.target is not None:
            bound = scale * outcome.row.target.bound
            panel.plot([bound, bound], [place - 0.42, place + 0.42], color=TARGET, linewidth=2, linestyle=":")
        text = f" {outcome.row.format(value / scale)}"
        panel.annotate(text, (max(value, scale * high, 0), place), va="center", xytext=(6, 0), fontsize=8,
                       textcoords="offset points")  # fmt: skip
    panel.set_yticks(places, [f"{outcome.row.name}\n(n={outcome.measured.runs})" for outcome in bars], fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    panel.set_xlabel(f"{AXES.get(unit, unit)}; dotted: target, line: spread of the turns", fontsize=8)
    panel.grid(axis="x", alpha=0.3)
