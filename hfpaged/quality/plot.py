"""KL by position in the text as a PNG, one line for each format, one panel for each length."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path

from hfpaged.errors import InvalidConfigError
from hfpaged.quality.contexts import Context
from hfpaged.quality.figures import Figures

SMOOTHED = 8  # positions in one point of a line: single ones are too noisy to see anything


def check_plot(path: str) -> None:
    """Raises InvalidConfigError where the plot could not be drawn, before anything is measured."""
    if not path.lower().endswith(".png"):
        raise InvalidConfigError(f"--plot {path}: only PNG is drawn; give a name that ends with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfigError(f"--plot {path} needs matplotlib, which is missing; pip install 'hfpaged[plot]'")


def draw(path: str | os.PathLike[str], all_figures: Sequence[Figures]) -> None:
    """Write the plot. No state of matplotlib outside of this figure changes, and no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    contexts = list(dict.fromkeys(figures.context for figures in all_figures))
    figure = Figure(figsize=(5.5 * len(contexts), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
    for panel, context in zip(panels, contexts, strict=True):
        for figures in (one for one in all_figures if one.context == context):
            panel.plot(*points(figures), label=figures.format)
        panel.set(yscale="log", xlabel="position in the text", title=_title(context))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("KL divergence from the native cache (nats)")
    panels[-1].legend()
    figure.savefig(Path(path), format="png", dpi=120)


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
