"""What two answers to one request must have in common: all but their names and times, what was cached, and where a
stream is cut into events, since who reads slowly gets several tokens at once.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

CHANGING = {"id", "item_id", "created", "created_at", "completed_at", "cached_tokens", "sequence_number"}
CUT = ("text", "content", "delta")


def normal(answer: httpx.Response) -> tuple[int, Any]:
    """Status, and the body: as JSON, or of a stream of events the whole text, and the events without it."""
    text = answer.text
    if text.startswith(("data: ", "event: ")):
        return answer.status_code, _events(text)
    try:
        return answer.status_code, _without(json.loads(text), CHANGING)
    except ValueError:
        return answer.status_code, text


def _events(text: str) -> tuple[str, list[Any]]:
    said: list[str] = []
    events: list[Any] = []
    for block in filter(None, text.split("\n\n")):
        name, _, data = block.rpartition("data: ")
        event = data if data == "[DONE]" else _without(_cut(json.loads(data), said), CHANGING)
        if events[-1:] != [(name, event)]:
            events.append((name, event))
    return "".join(said), events


def _cut(value: Any, said: list[str]) -> Any:
    """Without the texts, which are noted."""
    if isinstance(value, list):
        return [_cut(each, said) for each in value]
    if not isinstance(value, dict):
        return value
    said.extend(value[name] for name in CUT if isinstance(value.get(name), str))
    return {name: _cut(each, said) for name, each in value.items() if name not in CUT or not isinstance(each, str)}


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, list):
        return [_without(each, names) for each in value]
    if isinstance(value, dict):
        return {name: _without(each, names) for name, each in value.items() if name not in names}
    return value
