"""What a server's streamed answer says, and when each part of it came."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from hfpaged.bench.endpoint import EndpointError, remedy

EVENT = b"data: "
SHOWN = 600  # characters of an answer that is no good


@dataclass(frozen=True)
class Answer:
    """Times are those of one clock, in seconds. `parts` are the texts with the time of each; `tokens` is what the
    server says it has generated, None where it does not.
    """

    sent: float
    end: float
    parts: list[tuple[float, str]]
    tokens: int | None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.parts)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.parts[0][0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between parts that came one after the other."""
        times = [when for when, _ in self.parts]
        return [later - earlier for earlier, later in pairwise(times)]


def read_answer(sent: float, pieces: Sequence[tuple[float, str]]) -> Answer:
    """Of the bytes of one HTTP answer (as latin-1) and their times. Raises EndpointError where it is no stream that
    has ended well.
    """
    try:
        return _read(sent, pieces)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        received = "".join(text for _, text in pieces).encode("latin-1")
        raise EndpointError(f"the server streams no events of completions ({error}): {_shown(received)}") from error


def _read(sent: float, pieces: Sequence[tuple[float, str]]) -> Answer:
    received = "".join(text for _, text in pieces).encode("latin-1")
    head, found, _ = received.partition(b"\r\n\r\n")
    status = [*head.split(b" ", 2), b""][1]
    if not found or status != b"200":
        code = int(status) if status.isdigit() else None
        told = "" if code is None else f"; {remedy(code)}"
        raise EndpointError(f"the server answered {_shown(received)}{told}", code)
    ends = list(accumulate(len(text) for _, text in pieces))
    parts: list[tuple[float, str]] = []
    tokens = None
    for offset, data in _events(received, len(head) + 4, b"transfer-encoding: chunked" in head.lower()):
        text, count = _read_event(data)
        tokens = tokens if count is None else count
        if text:
            parts.append((pieces[bisect_left(ends, offset)][0], text))
    if not parts:
        raise EndpointError(f"the server gave no text: {_shown(received)}")
    return Answer(sent, pieces[-1][0], parts, tokens)


def _shown(received: bytes) -> str:
    """The beginning and the end of what came."""
    text = received.decode("utf-8", "replace")
    return repr(text) if len(text) <= SHOWN else f"{text[: SHOWN // 2]!r} ... {text[-SHOWN // 2 :]!r}"


def _read_event(data: bytes) -> tuple[str, int | None]:
    """Text and, where it is there, how many tokens there are."""
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise EndpointError(f"the server says {event['error']}")
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return text, (event.get("usage") or {}).get("completion_tokens")


def _events(received: bytes, start: int, is_chunked: bool) -> Iterator[tuple[int, bytes]]:
    """The JSON of each event, and how many bytes had come when it was whole."""
    waiting = b""
    for offset, data in _chunks(received, start) if is_chunked else [(len(received), received[start:])]:
        *lines, waiting = (waiting + data).split(b"\n")
        for line in lines:
            if line.startswith(EVENT) and line.strip() != EVENT + b"[DONE]":
                yield offset, line[len(EVENT) :]


def _chunks(received: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    while (line_end := received.find(b"\r\n", start)) >= 0:
        size = int(received[start:line_end].split(b";")[0] or b"0", 16)
        start = line_end + 2 + size + 2
        if size:
            yield start, received[line_end + 2 : line_end + 2 + size]
