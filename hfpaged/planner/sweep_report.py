"""A sweep for people and for programs: tables of text, a page, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfpaged.planner.sweep import Concurrency
from hfpaged.planner.sweep_hits import HitsByPool, sentences
from hfpaged.planner.sweep_replays import MOST
from hfpaged.planner.units import binary, counted

PLAIN_WIDTH = 120  # where stdout is no terminal

Grid = tuple[Sequence[str], list[list[str]]]  # heads, rows

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #202020 }}
svg {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
caption {{ text-align: left; font-weight: 600; padding: .3rem 0 }}
th, td {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; font-variant-numeric: tabular-nums }}
th:first-child, td:first-child {{ text-align: left }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Sweep:
    """All that one `plan --sweep` has found."""

    model: str
    device: str
    pool: int
    fits: Concurrency
    hits: HitsByPool | None = None
    skipped: int = 0
    left_out: Sequence[str] = ()  # of what was chosen

    @property
    def title(self) -> str:
        return f"{self.model} on {self.device}, a pool of {binary(self.pool)}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        hits = None if self.hits is None else self.hits.as_json()
        return {
            "model": self.model, "device": self.device, "pool_bytes": self.pool,
            "concurrency": self.fits.as_json(), "hits": hits, "skipped_lines": self.skipped,
            "notes": list(self.notes()),
        }  # fmt: skip

    def notes(self) -> Iterator[str]:
        """What whoever reads the figures must know."""
        yield from self.left_out
        for name, why in self.fits.left_out.items():
            yield f"{name} is left out: {why}"
        if self.skipped:
            yield f"{counted(self.skipped, 'line')} of the trace could not be read"
        if self.hits is not None:
            if not self.hits.replayed:
                yield f"no replays beside the curve: they are made of up to {MOST:,} requests; see --requests"
            yield (
                "hits are those of a least-recently-used cache that holds each request from its arrival on; in a real "
                "pool requests that run keep their blocks, and those that wait come later, as replays know"
            )

    def conclusions(self) -> list[str]:
        """The last lines."""
        if self.hits is not None:
            return list(sentences(self.hits))
        own = next(iter(self.fits.counts.values()))
        fitting = [(tokens, count) for tokens, count in zip(self.fits.contexts, own, strict=True) if count]
        if not fitting:
            return [f"not one request of {self.fits.contexts[0]:,} tokens fits"]
        ends = dict.fromkeys((fitting[0], fitting[-1]))
        return [" or ".join(f"{counted(count, 'request')} of {tokens:,} tokens" for tokens, count in ends) + " at once"]


def show(sweep: Sweep) -> None:
    """Print it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(Text(sweep.title, style="bold"))
    for caption, (heads, rows) in _tables(sweep):
        table = Table(box=None, padding=(0, 2, 0, 0))
        for index, head in enumerate(heads):
            table.add_column(Text(head), justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(Text(f"\n{caption}", style="bold"))
        console.print(table)
    console.print()
    for note in sweep.notes():
        console.print(Text(f"note: {note}", style="yellow"))
    for line in sweep.conclusions():
        console.print(Text(line, style="bold"))


def write(sweep: Sweep, path: str) -> None:
    """The picture, or a page with it and all figures that needs no other file."""
    from hfpaged.picture import save
    from hfpaged.planner.sweep_plot import figure_of, svg_of

    figure = figure_of(sweep.title, sweep.fits, sweep.hits)
    if Path(path).suffix.lower() == ".png":
        save(figure, path)
        return
    parts = [f"<p>{escape(line)}</p>" for line in sweep.conclusions()]
    parts += [svg_of(figure), *(_html(caption, grid) for caption, grid in _tables(sweep))]
    parts += [f"<p>Note: {escape(note)}</p>" for note in sweep.notes()]
    Path(path).write_text(PAGE.format(title=escape(sweep.title), body="\n".join(parts)), encoding="utf-8")


def _tables(sweep: Sweep) -> Iterator[tuple[str, Grid]]:
    yield "Requests that fit at once, by their tokens and the KV format", _counts(sweep.fits)
    if sweep.hits is not None:
        yield "Prompt tokens that are found, by the pool and the KV format (* this plan's)", _ratios(sweep.hits)


def _counts(fits: Concurrency) -> Grid:
    columns = list(fits.counts.values())
    rows = [[f"{tokens:,}", *(f"{counts[i]:,}" for counts in columns)] for i, tokens in enumerate(fits.contexts)]
    return ["tokens", *fits.counts], rows


def _ratios(hits: HitsByPool) -> Grid:
    formats = {hits.kv_format: hits.token_bytes} | hits.others
    heads = ["pool", *formats] + [f"{hits.kv_format}, replayed"] * bool(hits.replayed)
    rows = []
    for pool in hits.sizes():
        mark = " *" if pool == hits.pool else ""
        row = [binary(pool) + mark, *(f"{hits.at(pool, size):.1%}" for size in formats.values())]
        if hits.replayed:
            row.append(f"{hits.replayed[pool]:.1%}" if pool in hits.replayed else "-")
        rows.append(row)
    return heads, rows


def _html(caption: str, grid: Grid) -> str:
    heads, rows = grid
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<table><caption>{escape(caption)}</caption>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    )
