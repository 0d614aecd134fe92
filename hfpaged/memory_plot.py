"""A memory map as a picture. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpaged.errors import InvalidConfigError
from hfpaged.memory_grid import CACHED, FREE, OTHERS, UNUSED, MemoryGrid, grid_of
from hfpaged.picture import DPI, can_plot, check_png, save

if TYPE_CHECKING:
    from hfpaged.memory_map import MemoryMap

# Of Okabe and Ito, "Color Universal Design" (2008): apart for the common kinds of colour blindness, too.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
COLOURS = {OTHERS[0]: "#808080", OTHERS[1]: "#A4A4A4", CACHED: "#D6D6D6", FREE: "#EAEAEA", UNUSED: "#FFFFFF"}
LINES = "#BDBDBD"
MARK = "#202020"
CELL, GRID, LEGEND_LINE = 0.19, 3.2, 0.17  # inches: of a cell at least, of a grid's width at least


def draw(memory: MemoryMap, path: str | os.PathLike[str] | None) -> Any:
    """The figure; None where it was written to `path`. No state of matplotlib outside of it changes, and no display is
    needed.

    Raises InvalidConfigError without matplotlib, and for a path that does not end with .png.
    """
    if path is not None:
        check_png(f"plot({str(path)!r})", Path(path))
    elif not can_plot():
        raise InvalidConfigError("plot() needs matplotlib, which is missing; pip install 'hfpaged[plot]'")
    figure = _figure(memory)
    if path is None:
        return figure
    save(figure, Path(path))
    return None


def png(memory: MemoryMap) -> bytes:
    """The picture as the bytes of a PNG."""
    return _png_of(_figure(memory))


def _png_of(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def _figure(memory: MemoryMap) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            """What a notebook shows, whether or not its user has imported pyplot."""
            return _png_of(self)

    grid = grid_of(memory)
    legend, cell = _legend(grid), max(CELL, GRID / grid.columns)
    size = (grid.columns * cell + 2.9, max(grid.rows * cell + 0.9, len(legend) * LEGEND_LINE + 0.3))
    # A background of its own, so that its dark text can be read on light and dark pages.
    figure = Picture(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_cells(axes, grid)
    _draw_marks(axes, grid)
    axes.set_title(_title(memory, grid), fontsize=9, loc="left", color=MARK)
    figure.legend(handles=legend, loc="outside right upper", fontsize=8, frameon=False, labelcolor=MARK)
    return figure


def _draw_cells(axes: Any, grid: MemoryGrid) -> None:
    """One square for each cell; row i begins with the block that its label says."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    squares = [Rectangle((number % grid.columns, number // grid.columns), 1, 1) for number in range(len(grid.cells))]
    colours = [PALETTE[cell] if isinstance(cell, int) else COLOURS[cell] for cell in grid.cells]
    axes.add_collection(PatchCollection(squares, facecolors=colours, edgecolors=LINES, linewidths=0.6))
    axes.set(xlim=(-0.1, grid.columns + 0.1), ylim=(max(grid.rows, 1) + 0.1, -0.1), aspect="equal", xticks=[])
    every = max(-(-grid.rows // 16), 1)
    rows = range(0, grid.rows, every)
    axes.set_yticks(
        [row + 0.5 for row in rows], [f"{row * grid.columns * grid.per_cell:,}" for row in rows], fontsize=8
    )
    axes.set_ylabel("first block of the row", fontsize=8, color=MARK)
    axes.tick_params(length=0, colors=MARK)
    axes.set_anchor("NW")
    axes.spines[:].set_visible(False)


def _draw_marks(axes: Any, grid: MemoryGrid) -> None:
    """A stroke through shared cells, a dot in cached ones."""
    from matplotlib.collections import LineCollection

    corners = [divmod(number, grid.columns) for number in sorted(grid.shared)]
    strokes = [[(column + 0.18, row + 0.82), (column + 0.82, row + 0.18)] for row, column in corners]
    axes.add_collection(LineCollection(strokes, colors=MARK, linewidths=1.1))
    dots = [divmod(number, grid.columns) for number, cell in enumerate(grid.cells) if cell == CACHED]
    axes.scatter([column + 0.5 for _, column in dots], [row + 0.5 for row, _ in dots], s=6, c=MARK, linewidths=0)


def _legend(grid: MemoryGrid) -> list[Any]:
    """One line for each kind of cell that there is, at most a dozen."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def square(label: str, colour: str) -> Any:
        return Patch(facecolor=colour, edgecolor=LINES, label=label)

    there = set(grid.cells)
    lines = [square(name, PALETTE[place]) for place, name in enumerate(grid.names)]
    if grid.num_others:
        lines.append(square(f"{grid.num_others:,} others, in two greys", COLOURS[OTHERS[0]]))
    if grid.shared:
        stroke: dict[str, Any] = {"color": MARK, "linestyle": "", "marker": (2, 0, -45), "markersize": 8}
        lines.append(Line2D([], [], label="shared", **stroke))
    if CACHED in there:
        dot: dict[str, Any] = {"color": COLOURS[CACHED], "marker": "s", "markersize": 9, "linestyle": ""}
        lines.append(Line2D([], [], label=f"• {CACHED}", markeredgecolor=LINES, **dot))
    return lines + [square(kind, COLOURS[kind]) for kind in (FREE, UNUSED) if kind in there]


def _title(memory: MemoryMap, grid: MemoryGrid) -> str:
    lines = [
        f"{memory.num_used:,} of {memory.num_blocks:,} blocks used ({memory.num_shared:,} shared), "
        f"{memory.num_cached:,} cached, {memory.num_free:,} free"
    ]
    if grid.per_cell > 1:
        lines.append(f"a cell is {grid.per_cell:,} blocks, and shows what most of them are")
    if grid.num_shown < memory.num_blocks:
        lines.append(f"{memory.num_blocks - grid.num_shown:,} more blocks, never used, are not shown")
    return "\n".join(lines)
