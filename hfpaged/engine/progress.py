"""A progress bar for many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hfpaged.live_display import hide, show, terminal_console


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Call what is given with the new tokens of each prompt that has ended."""
    if not shown:
        yield lambda tokens: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    console = terminal_console()
    bar = Progress(*columns, TextColumn("{task.fields[rate]}"), console=console)
    task = bar.add_task("prompts", total=total, rate="")
    tokens = 0

    def advance(new: int) -> None:
        nonlocal tokens
        tokens += new
        seconds = bar.tasks[0].elapsed or 1e-9
        bar.update(task, advance=1, rate=f"{tokens / seconds:,.0f} tokens/s")

    show(console, bar)  # not by itself, which a watch at the same time would be in the way of
    try:
        yield advance
    finally:
        hide(console, bar)
