"""The sweep as a picture: requests by context and format, and the miss ratio by the size of the pool."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.picture import can_plot, new_figure
from hfpaged.planner.sweep import Concurrency
from hfpaged.planner.sweep_hits import HitsByPool
from hfpaged.planner.units import binary

WIDTH, HEIGHT = 7.0, 4.5  # inches of one plot
GIB = 1 << 30
# Of Okabe and Ito, "Color Universal Design" (2008): apart for the common kinds of colour blindness, too.
COLOURS = {"auto": "#0072B2", "fp8_e4m3": "#D55E00", "int8": "#009E73", "k8v4": "#CC79A7", "int4": "#E69F00"}
OTHER = "#56B4E9"


def check_file(path: str) -> None:
    """Raises InvalidConfigError where nothing could be drawn, before anything is read."""
    if Path(path).suffix.lower() not in (".png", ".html"):
        raise InvalidConfigError(f"--sweep {path}: PNG and HTML are written; give a name that ends with .png or .html")
    if not Path(path).resolve().parent.is_dir():
        raise InvalidConfigError(f"--sweep {path}: its folder does not exist; make it first")
    if not can_plot():
        raise InvalidConfigError(f"--sweep {path} needs matplotlib, which is missing; pip install 'hfpaged[plot]'")


def figure_of(title: str, fits: Concurrency, hits: HitsByPool | None) -> Any:
    """One plot, or two beside each other."""
    figure = new_figure(WIDTH * (2 if hits else 1), HEIGHT)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, 2 if hits else 1, squeeze=False)[0]
    _concurrency(axes[0], fits)
    if hits is not None:
        _misses(axes[1], hits)
    return figure


def svg_of(figure: Any) -> str:
    """The picture as an element of a page, without a reference to anything outside of it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    return text[text.index("<svg") :]


def _concurrency(axis: Any, fits: Concurrency) -> None:
    names: dict[tuple[int, ...], list[str]] = {}
    for name, counts in fits.counts.items():
        names.setdefault(counts, []).append(name)  # lines upon each other are one
    for counts, same in names.items():
        shown = [(tokens, count) for tokens, count in zip(fits.contexts, counts, strict=True) if count]
        if shown:
            axis.plot(
                *zip(*shown, strict=True),
                marker="o",
                markersize=3,
                color=COLOURS.get(same[-1], OTHER),
                label=", ".join(same),
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(fits.contexts, [f"{tokens:,}" for tokens in fits.contexts], rotation=45, ha="right")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
    _label(axis, "Requests that fit at once", "tokens of a request", "requests")


def _misses(axis: Any, hits: HitsByPool) -> None:
    sizes = hits.points()
    formats = {hits.kv_format: hits.token_bytes} | hits.others
    for name, size in formats.items():
        misses = [100 * (1 - hits.at(pool, size)) for pool in sizes]
        axis.plot([pool / GIB for pool in sizes], misses, color=COLOURS.get(name, OTHER), label=name)
    if hits.replayed:
        sizes = [size for size in hits.replayed if size <= hits.points()[-1]]
        found = [100 * (1 - hits.replayed[size]) for size in sizes]
        axis.plot([size / GIB for size in sizes], found, "x", color="#202020", label=f"{hits.kv_format}, replayed")
    axis.axvline(hits.pool / GIB, color="#707070", linestyle="--", label=f"the pool of this plan, {binary(hits.pool)}")
    axis.set_ylim(0, 102)
    axis.set_xlim(left=0)
    _label(axis, "Prompt tokens that are not found", "pool, GiB", "miss ratio, %")


def _label(axis: Any, title: str, across: str, up: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(color="#E4E4E4")
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)
