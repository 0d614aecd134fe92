"""Where a watch is shown: live on a terminal, in place in a notebook, line by line elsewhere."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol

import rich
from rich.console import Console

from hfpaged.live_display import hide, show, terminal_console
from hfpaged.watching.tracker import Figures
from hfpaged.watching.view import View
from hfpaged.watching.words import last_line, live_line

# Where lines stay, one in so many seconds is enough.
PLAIN_SECONDS = 10.0
NOTEBOOK_WIDTH = 140


class Screen(Protocol):
    """What a watch draws on."""

    def show(self, all_figures: Sequence[Figures]) -> None:
        """This is how it is now."""

    def finish(self, all_figures: Sequence[Figures]) -> None:
        """The watch is over: what stays is a line for each thing."""


class LiveScreen:
    """A terminal, which others may draw on at the same time."""

    def __init__(self, console: Console, view: View) -> None:
        self._console, self._view = console, view

    def show(self, all_figures: Sequence[Figures]) -> None:
        self._view.figures = all_figures

    def finish(self, all_figures: Sequence[Figures]) -> None:
        hide(self._console, self._view)
        print_lines(self._console, map(last_line, all_figures))


class PlainScreen:
    """A file, a pipe, or a terminal that somebody else draws on."""

    def __init__(self, console: Console, first: Sequence[Figures]) -> None:
        self._console = console
        self._told = max(figures.now.time for figures in first)

    def show(self, all_figures: Sequence[Figures]) -> None:
        time = max(figures.now.time for figures in all_figures)
        if time - self._told >= PLAIN_SECONDS:
            self._told = time
            print_lines(self._console, map(live_line, all_figures))

    def finish(self, all_figures: Sequence[Figures]) -> None:
        print_lines(self._console, map(last_line, all_figures))


class NotebookScreen:
    """The cell of a notebook: one output, which is put anew. `display` is IPython's."""

    def __init__(self, display: Any, first: Sequence[Figures]) -> None:
        self._handle = display(Shown(drawn(first)), display_id=True)

    def show(self, all_figures: Sequence[Figures]) -> None:
        self._update(drawn(all_figures))

    def finish(self, all_figures: Sequence[Figures]) -> None:
        self._update("\n".join(map(last_line, all_figures)))

    def _update(self, text: str) -> None:
        if self._handle is not None:  # outside of a kernel there is none
            self._handle.update(Shown(text))


class Shown:
    """A text as a notebook shows it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._text)}</pre>"

    def __repr__(self) -> str:
        return self._text


def screen_for(console: Console | None, first: Sequence[Figures]) -> Screen:
    """What fits to where the program runs; `console` if its user has one."""
    if console is None and rich.get_console().is_jupyter:
        return NotebookScreen(import_module("IPython.display").display, first)
    if console is None:
        console = terminal_console()
        if not console.is_terminal:  # what a program prints may go into a file, and this is no part of it
            console = Console(stderr=True)
    view = View(first)
    if console.is_terminal and not console.is_dumb_terminal and show(console, view):
        return LiveScreen(console, view)
    return PlainScreen(console, first)


def drawn(all_figures: Sequence[Figures]) -> str:
    """A view as text, without colours."""
    file = io.StringIO()
    Console(file=file, width=NOTEBOOK_WIDTH, force_terminal=False, force_jupyter=False).print(View(all_figures))
    return file.getvalue().rstrip()


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Whole lines, however wide the console is."""
    for each in lines:
        console.print(each, markup=False, highlight=False, soft_wrap=True)
