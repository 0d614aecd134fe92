"""The items that an answer of /v1/responses is made of, and the events that tell of them as they come."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from hfpaged.serve.prose import Piece, ToolCall

Event = dict[str, Any]

# Of each kind of text: the item's own type, and the part's, which its events are called after.
_MESSAGE = ("message", "output_text")
_REASONING = ("reasoning", "reasoning_text")


def new_id(prefix: str) -> str:
    """As clients know those of responses and their items."""
    return f"{prefix}_{uuid.uuid4().hex}"


class Output:
    """`items` are those that are whole, in order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: tuple[str, str] | None = None
        self._id, self._text = "", ""

    def events(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        """What is told of some more pieces."""
        for piece in pieces:
            if piece.call is not None:
                yield from self._call(piece.call)
            elif piece.content:
                yield from self._add(_MESSAGE, piece.content)
            elif piece.reasoning:
                yield from self._add(_REASONING, piece.reasoning)

    def end(self, status: str) -> Iterator[Event]:
        """The last ones. An answer without anything is an empty message."""
        if self._open is None and not any(item["type"] in ("message", "function_call") for item in self.items):
            yield from self._begin(_MESSAGE)
        yield from self._close(status)

    def _add(self, kind: tuple[str, str], text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        self._text += text
        yield self._text_event("delta", {"delta": text})

    def _begin(self, kind: tuple[str, str]) -> Iterator[Event]:
        self._open, self._id, self._text = kind, new_id("msg" if kind is _MESSAGE else "rs"), ""
        yield self._item_event("added", {**self._item("in_progress"), "content": []})
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": self._part}

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        yield self._text_event("done", {"text": self._text})
        yield {"type": "response.content_part.done", **self._place, "content_index": 0, "part": self._part}
        item = self._item(status)
        yield self._item_event("done", item)
        self.items.append(item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close("completed")
        self._id = new_id("fc")
        item = {
            "type": "function_call", "id": self._id, "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }  # fmt: skip
        yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": call.arguments}
        yield {"type": "response.function_call_arguments.done", **self._place, "name": call.name,
               "arguments": call.arguments}  # fmt: skip
        yield self._item_event("done", item)
        self.items.append(item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.items)}

    @property
    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self._open is _MESSAGE else {}
        return {"type": self._open[1], "text": self._text, **more}

    def _item(self, status: str) -> dict[str, Any]:
        assert self._open is not None
        more: dict[str, Any] = {"role": "assistant"} if self._open is _MESSAGE else {"summary": []}
        return {"type": self._open[0], "id": self._id, "status": status, **more, "content": [self._part]}

    def _text_event(self, what: str, told: dict[str, Any]) -> Event:
        """An empty list of logprobs is of texts only, and must be there."""
        assert self._open is not None
        more: dict[str, Any] = {"logprobs": []} if self._open is _MESSAGE else {}
        return {"type": f"response.{self._open[1]}.{what}", **self._place, "content_index": 0, **told, **more}

    def _item_event(self, what: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": len(self.items), "item": item}
