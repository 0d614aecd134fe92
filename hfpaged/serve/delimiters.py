"""Delimiters in text that comes in pieces: found the same however it is cut."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple


class Cut(NamedTuple):
    """Text that is sure to stand before anything else, and the delimiter behind it (None: not yet, or no more)."""

    text: str
    delimiter: str | None


class Delimited:
    """Text so far that was not taken. `feed` it, then `take` until there is no delimiter any more."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> None:
        self._rest += text

    def take(self, delimiters: Iterable[str], *, is_last: bool = False) -> Cut:
        """What comes up to the first of `delimiters`, of several at one place the longest."""
        found = _compiled(tuple(delimiters))
        match = found.pattern.search(self._rest) if found.pattern else None
        end = len(self._rest) if is_last else self._sure(found)
        if match is not None and match.start() < end:
            cut = Cut(self._rest[: match.start()], match[0])
            self._rest = self._rest[match.end() :]
            return cut
        cut = Cut(self._rest[:end], None)
        self._rest = self._rest[end:]
        return cut

    def _sure(self, delimiters: _Delimiters) -> int:
        """Where the first place is that may yet become a delimiter, or a longer one than it is."""
        length = len(self._rest)
        begun = range(max(0, length - delimiters.longest + 1), length)
        return next((start for start in begun if self._rest[start:] in delimiters.beginnings), length)


class _Delimiters(NamedTuple):
    pattern: re.Pattern[str] | None
    beginnings: frozenset[str]  # of them, none whole unless another one is longer
    longest: int


@functools.lru_cache(maxsize=64)
def _compiled(delimiters: tuple[str, ...]) -> _Delimiters:
    ordered = sorted(filter(None, delimiters), key=len, reverse=True)
    beginnings = frozenset(text[:end] for text in ordered for end in range(1, len(text)))
    pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
    return _Delimiters(pattern, beginnings, max(map(len, ordered), default=0))
