"""A progress bar for many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Call what is given with the new tokens of each prompt that has ended."""
    if not shown:
        yield lambda tokens: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[rate]}"), transient=True) as bar:
        task = bar.add_task("prompts", total=total, rate="")
        tokens = 0

        def advance(new: int) -> None:
            nonlocal tokens
            tokens += new
            seconds = bar.tasks[0].elapsed or 1e-9
            bar.update(task, advance=1, rate=f"{tokens / seconds:,.0f} tokens/s")

        yield advance
