"""What is shown live on a terminal. A console has room for one live display, and bars and watches may run at the same
time: they share it.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PER_SECOND = 4

_lock = threading.RLock()
_displays: dict[Console, LiveDisplay] = {}  # by console, those on which something is shown


def terminal_console() -> Console:
    """rich's own, so that what it prints meanwhile stands above. Where that can carry no second live display (rich
    before 14.1) it is left to the user's own ones.
    """
    import rich
    from rich.console import Console

    console = rich.get_console()
    return console if hasattr(console, "_live_stack") else _spare_console(Console)


def show(console: Console, renderable: Any) -> bool:
    """Show it below what is shown already, until `hide`; whether that can be done: not beside somebody else's display,
    with a rich before 14.1.
    """
    with _lock:
        display = _displays.get(console) or LiveDisplay(console)
        if not display.add(renderable):
            return False
        _displays[console] = display
        return True


def hide(console: Console, renderable: Any) -> None:
    """Undo `show`."""
    with _lock:
        display = _displays.get(console)
        if display is not None and display.remove(renderable):
            del _displays[console]


class LiveDisplay:
    """All that is shown on one console, from the first thing that comes to the last one that goes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[Any] = []
        self._live: Live | None = None

    def add(self, renderable: Any) -> bool:
        """Whether it is shown now."""
        self._shown.append(renderable)
        if self._live is None:
            return self._start()
        self._live.refresh()
        return True

    def remove(self, renderable: Any) -> bool:
        """Whether nothing is left."""
        self._shown = [other for other in self._shown if other is not renderable]
        if self._live is not None and self._shown:
            self._live.refresh()
        elif self._live is not None:
            _stop(self._live)
        return not self._shown

    def _start(self) -> bool:
        from rich.errors import LiveError
        from rich.live import Live

        live = Live(console=self._console, transient=True, refresh_per_second=PER_SECOND, get_renderable=self._all)
        try:
            live.start()
        except LiveError:
            return False
        self._live = live
        return True

    def _all(self) -> Any:
        """Called by the thread that draws: no lock is taken, for who holds it may wait for that thread."""
        from rich.console import Group

        return Group(*self._shown)


def _stop(live: Live) -> None:
    from rich.file_proxy import FileProxy

    # It gives back the streams that it found. Where its user has put others in their place meanwhile, these stay.
    if not isinstance(sys.stdout, FileProxy):
        live._restore_stdout = None
    if not isinstance(sys.stderr, FileProxy):
        live._restore_stderr = None
    live.stop()


_spare: list[Console] = []


def _spare_console(make: type[Console]) -> Console:
    """One for all of ours."""
    if not _spare:
        _spare.append(make())
    return _spare[0]
