"""What answers are taken apart into."""

from __future__ import annotations

import secrets
import string
from typing import NamedTuple

_LETTERS = string.ascii_letters + string.digits


class ToolCall(NamedTuple):
    """`arguments` is an object of JSON, as text."""

    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """What is new of an answer: one of the three."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


class Prose:
    """Text without the white space around it that only parts it from what is no text."""

    def __init__(self, *, strips: bool = False) -> None:
        self._strips, self._held = strips, ""
        self._stripped_before = strips

    def add(self, text: str) -> str:
        """What may be given out; white space at its end waits for what comes."""
        text = self._held + (text.lstrip() if self._strips and not self._held else text)
        sure = text.rstrip()
        self._held = text[len(sure) :]
        self._strips = self._strips and not text
        return sure

    def cut(self) -> str:
        """Something else comes: the white space that waits, which is not given out then. So it is behind that."""
        held, self._held = self._held, ""
        self._stripped_before, self._strips = self._strips, True
        return held

    def uncut(self) -> None:
        """It was text after all: `add` it."""
        self._strips = self._stripped_before

    def finish(self) -> str:
        """The rest."""
        held, self._held = self._held, ""
        return "" if self._strips else held


def new_id(length: int | None = None) -> str:
    """Of a call."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


def joined(pieces: list[Piece]) -> list[Piece]:
    """Those that say anything; what follows on one another of a kind is one piece."""
    found: list[Piece] = []
    for piece in pieces:
        if piece.call is None and not piece.content and not piece.reasoning:
            continue
        last = found[-1] if found else None
        if last is not None and last.call is None and piece.call is None and bool(last.content) == bool(piece.content):
            found[-1] = Piece(last.content + piece.content, last.reasoning + piece.reasoning)
        else:
            found.append(piece)
    return found
