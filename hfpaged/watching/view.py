"""The figures of a watch as rich draws them: a line for one thing, a table for several."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hfpaged.config import format_bytes
from hfpaged.watching.tracker import Figures
from hfpaged.watching.words import hits, live_parts, rate, share_of

WIDTH = 20
HEADS = (
    "used", "free", "cached", "blocks", "running", "waiting", "prefill/s", "decode/s", "hits", "preempted", "bytes",
)  # fmt: skip
# Told apart by form and not by colour alone.
USED, CACHED, FREE = "█", "▒", "·"
PLAIN_FORMS = str.maketrans(USED + CACHED + FREE, "#+.")


class View:
    """Draws what `figures` is set to, at any moment and in any thread."""

    def __init__(self, figures: Sequence[Figures]) -> None:
        self.figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        figures, is_ascii = self.figures, options.ascii_only
        yield line(figures[0], is_ascii) if len(figures) == 1 else table(figures, is_ascii)


def line(figures: Figures, is_ascii: bool = False) -> Text:
    """On a narrow terminal it goes on in the next one."""
    now = figures.now
    separator = " | " if is_ascii else " · "
    parts = [f" {share_of(now.blocks_used, now.blocks_total)}", *live_parts(figures)]
    return Text.assemble((figures.name, "bold"), " ", bar(figures, is_ascii), separator.join(parts))


def table(all_figures: Sequence[Figures], is_ascii: bool = False) -> Table:
    """One row for each thing."""
    grid = Table(box=None, pad_edge=False, show_edge=False)
    grid.add_column("")
    grid.add_column("pool")
    for head in HEADS:
        grid.add_column(head, justify="right")
    for figures in all_figures:
        grid.add_row(
            Text(figures.name, style="dim" if figures.is_over else "bold"), bar(figures, is_ascii), *_cells(figures)
        )
    return grid


def _cells(figures: Figures) -> list[str]:
    now = figures.now
    counts = (now.blocks_used, now.blocks_free, now.blocks_cached, now.blocks_total, now.running, now.waiting)
    return [
        *("-" if count is None else f"{count:,}" for count in counts),
        rate(figures.prefill_rate),
        rate(figures.decode_rate),
        hits(figures),
        "-" if now.preemptions is None else str(now.preemptions),
        format_bytes(now.bytes_used),
    ]


def bar(figures: Figures, is_ascii: bool = False) -> Text:
    """Blocks in use, cached ones, and the rest."""
    now = figures.now
    used = _cells_for(now.blocks_used, now.blocks_total)
    cached = min(_cells_for(now.blocks_cached, now.blocks_total), WIDTH - used)
    style = "red" if now.blocks_used > 0.9 * now.blocks_total > 0 else "cyan"
    parts = ((USED * used, style), (CACHED * cached, "yellow"), (FREE * (WIDTH - used - cached), "dim"))
    if is_ascii:
        parts = tuple((forms.translate(PLAIN_FORMS), style) for forms, style in parts)  # type: ignore[assignment]
    return Text.assemble(*parts)


def _cells_for(count: int, total: int) -> int:
    """At least one where there is anything."""
    return min(max(round(WIDTH * count / total), 1), WIDTH) if count and total else 0
