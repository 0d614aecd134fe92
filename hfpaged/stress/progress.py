"""How far a stress run is: a line that changes on a terminal, one every ten seconds elsewhere, both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from hfpaged.config import format_bytes
from hfpaged.stress.load import Load

EVERY = 10.0  # seconds between two lines where there is no terminal


@contextmanager
def progress(seconds: float) -> Iterator[Callable[[Load], None]]:
    """Gives a function that is to be called after each step."""
    console = Console(file=sys.stderr)
    if console.is_terminal:
        with console.status("hfpaged stress") as status:
            yield lambda load: status.update(_line(load, seconds))
        return
    due = EVERY

    def tell(load: Load) -> None:
        nonlocal due
        if load.watch.seconds >= due:
            due += EVERY
            print(f"hfpaged: {_line(load, seconds)}", file=sys.stderr, flush=True)

    yield tell


def _line(load: Load, seconds: float) -> str:
    watch = load.watch
    if not watch.samples:
        return "the first steps"
    last = watch.samples[-1]
    share = 100 * last.used / max(last.total, 1)
    until = f"of {seconds:.0f} s" if watch.is_loading else "s, waiting for what is in flight"
    return (
        f"{watch.seconds:.0f} {until}: {load.counts.received:,} requests, pool {share:.0f} % (peak "
        f"{100 * watch.peak:.0f} %), {format_bytes(last.resident)} resident, {watch.preemptions:,} preemptions, "
        f"{load.checker.checked} checked, {len(load.checker.differences)} differ"
    )
