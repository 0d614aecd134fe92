"""Plots that commands write: whether they can be drawn, and an empty figure. matplotlib is imported when one is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hfpaged.errors import InvalidConfigError

DPI = 120


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def check_png(asked: str, path: str | Path) -> None:
    """Raises InvalidConfigError where no PNG could be written, before anything is measured. `asked` is the option as a
    user wrote it, say "--plot kl.png".
    """
    if Path(path).suffix.lower() != ".png":
        raise InvalidConfigError(f"{asked}: only PNG is drawn; give a name that ends with .png")
    if not can_plot():
        raise InvalidConfigError(f"{asked} needs matplotlib, which is missing; pip install 'hfpaged[plot]'")


def new_figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches. No state of matplotlib outside of it changes, and no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Write it as PNG."""
    figure.savefig(Path(path), format="png", dpi=DPI)
