"""How far a run is: a bar on a terminal, one line for each part elsewhere, both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Begin = Callable[[str, int], Callable[[], None]]


@contextmanager
def progress() -> Iterator[Begin]:
    """Gives a function that begins a part of so many steps and returns what is to be called after each step."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def begin(name: str, steps: int) -> Callable[[], None]:
            if not console.is_terminal:
                print(f"hfpaged: {name}", file=sys.stderr, flush=True)
            task = bars.add_task(name, total=steps)
            return lambda: bars.advance(task)

        yield begin
