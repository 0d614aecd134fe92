"""Where tables and lines go, and the bar of what is measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hfpaged import json_file
from hfpaged.bench.catalog import Row

WIDTH = 170  # of a table where nobody says how wide it may be


def console_for(json_path: str | None) -> Console:
    """For people: stdout, or stderr where stdout is for JSON."""
    file = json_file.for_people(json_path)
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=WIDTH)


def say(console: Console, line: str) -> None:
    """One line as it is, however long."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def shown(rows: Sequence[Row]) -> Iterator[Row]:
    """The same rows, with a bar on a terminal and one line for each elsewhere, both on stderr."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(rows))
        for index, row in enumerate(rows):
            progress.update(task, description=row.name, completed=index)
            if not console.is_terminal:
                print(f"hfpaged: {row.name} ({index + 1} of {len(rows)})", file=sys.stderr, flush=True)
            yield row
        progress.update(task, completed=len(rows))
