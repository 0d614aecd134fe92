"""Where two texts that begin alike first differ, in whole words, and a guess at what kind of thing differs there."""

from __future__ import annotations

import re
from typing import NamedTuple

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_NAME = r"(?-i:[A-Z])[\w'’-]+(?: (?-i:[A-Z])[\w'’-]+)*"
_QUOTE = r"[\"'`“”]"
_END = r"[\n,;)\]}]"
# The first kind that fits both texts is taken. A group "piece" is what differs, behind words that tell its kind.
_KINDS = (
    ("uuid", r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{32}\b"),
    ("date", r"(?<!\d)\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?!\d)|(?<!\d)\d{1,2}([-/.])\d{1,2}\1(?:\d{4}|\d{2})(?!\d)"),
    ("date", rf"(?:\b{_WEEKDAY},? )?\b(?:{_DAY}(?: of)? {_MONTH}|{_MONTH} {_DAY})(?:,? \d{{4}})?(?!\w)"),
    ("date", rf"\b{_MONTH} \d{{4}}\b|\b{_WEEKDAY}\b"),
    ("time", r"(?<!\d)\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]\.?m\b)?(?!\d)"),
    ("time", r"(?<!\d)1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?(?!\d)"),  # seconds or milliseconds since 1970
    ("user name", r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b"),
    ("user name", rf"\b(?:user[ _-]?(?:name|id)|login|name)(?: is|:| ?=) ?{_QUOTE}?(?P<piece>[\w.-]+(?: {_NAME})?)"),
    ("user name", rf"\b(?:user|account|client)(?::| ?=) ?{_QUOTE}?(?P<piece>[\w.-]+){_QUOTE}?(?=\s*(?:$|{_END}))"),
    ("user name", rf"\b(?:user|customer|client) {_QUOTE}?(?P<piece>{_NAME})"),
    ("user name", rf"\b(?:hello|hi|dear|i am|i'm|called|named)[:,]? {_QUOTE}?(?P<piece>{_NAME})"),
    ("number", r"(?<![\w.])[-+]?\d+(?:[.,]\d+)*(?!\w)"),
)  # fmt: skip
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS]
# A word without a space in it may be a whole line.
_LONGEST_WORD = 40


class Pieces(NamedTuple):
    """What stands at the first difference in both texts; `kind` None where it is nothing that we know."""

    here: str
    known: str
    kind: str | None


def differing_pieces(here: str, known: str) -> Pieces:
    """The whole words, dates, names ... in which two texts first differ."""
    pairs = enumerate(zip(here, known, strict=False))
    place = next((at for at, (first, second) in pairs if first != second), min(len(here), len(known)))
    for name, pattern in _PATTERNS:
        pieces = _piece(pattern, here, place), _piece(pattern, known, place)
        if name != "number" and pieces[0] and pieces[1] and pieces[0] != pieces[1]:
            return Pieces(pieces[0], pieces[1], name)
    (first, kind), (second, other) = _first_kind(here, place), _first_kind(known, place)
    if first == second:  # a piece that ends where the texts begin to differ
        return Pieces(_word(here, place), _word(known, place), None)
    return Pieces(first, second, kind if kind == other else None)


def _piece(pattern: re.Pattern[str], text: str, place: int) -> str | None:
    """What of `text` around `place` has the pattern."""
    group = "piece" if "piece" in pattern.groupindex else 0
    return next((m[group] for m in pattern.finditer(text) if m.start(group) <= place <= m.end(group)), None)


def _first_kind(text: str, place: int) -> tuple[str, str | None]:
    """The piece around `place` of the first pattern that fits, and its kind; else the word there."""
    pieces = ((_piece(pattern, text, place), kind) for kind, pattern in _PATTERNS)
    return next(((piece, kind) for piece, kind in pieces if piece), (_word(text, place), None))


def _word(text: str, place: int) -> str:
    start = max(text.rfind(" ", 0, place), text.rfind("\n", 0, place)) + 1
    start = max(start, place - _LONGEST_WORD // 2)
    end = next((at for at in range(place + 1, len(text)) if text[at].isspace()), len(text))
    return text[start : min(end, start + _LONGEST_WORD)]
