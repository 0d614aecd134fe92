"""KL by position in the text as a PNG, one line for each format, one panel for each length."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from hfpaged.picture import new_figure, save
from hfpaged.quality.contexts import Context
from hfpaged.quality.figures import Figures

SMOOTHED = 8  # positions in one point of a line: single ones are too noisy to see anything


def draw(path: str | os.PathLike[str], all_figures: Sequence[Figures]) -> None:
    """Write the plot."""
    contexts = list(dict.fromkeys(figures.context for figures in all_figures))
    figure = new_figure(5.5 * len(contexts), 4)
    panels = figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
    for panel, context in zip(panels, contexts, strict=True):
        for figures in (one for one in all_figures if one.context == context):
            panel.plot(*points(figures), label=figures.format)
        panel.set(yscale="log", xlabel="position in the text", title=_title(context))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("KL divergence from the native cache (nats)")
    panels[-1].legend()
    save(figure, Path(path))


def points(figures: Figures) -> tuple[list[float], list[float]]:
    """Positions and KL, each the mean of SMOOTHED neighbours; the last ones may be fewer. Zero, which a
    logarithmic axis cannot show, is a gap.
    """
    values, start = figures.kl_by_position, figures.context.prompt
    chunks = [values[i : i + SMOOTHED] for i in range(0, len(values), SMOOTHED)]
    places = [start + i * SMOOTHED + (len(chunk) - 1) / 2 for i, chunk in enumerate(chunks)]
    return places, [sum(chunk) / len(chunk) or math.nan for chunk in chunks]


def _title(context: Context) -> str:
    return f"{context.name}: the last {context.fed} of {context.cached} tokens"
