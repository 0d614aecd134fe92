"""The message of a choice, whole or in deltas, from the pieces of an answer."""

from __future__ import annotations

from typing import Any

from hfpaged.engine.outputs import SequenceOutput
from hfpaged.serve.answer_plan import Pieces
from hfpaged.serve.prose import Piece, ToolCall


def message_of(pieces: Pieces | None, seq: SequenceOutput) -> tuple[dict[str, Any], str | None]:
    """(the message, the API's word for how it ended). Its content is null where there are calls instead."""
    text = seq.text or ""
    if pieces is None:
        return {"role": "assistant", "content": text, "refusal": None}, seq.finish_reason
    found = pieces.new(text, is_last=True)
    calls = [_call(piece.call) for piece in found if piece.call is not None]
    content, reasoning = "".join(p.content for p in found), "".join(p.reasoning for p in found)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message, pieces.finish_reason(seq.finish_reason)


def deltas_of(pieces: Pieces, text: str, is_last: bool) -> list[dict[str, Any]]:
    """What is new, as a stream's deltas. Calls come whole."""
    before = pieces.num_calls
    found = []
    for piece in pieces.new(text, is_last=is_last):
        found.append(_delta(piece, before))
        before += piece.call is not None
    return found


def _delta(piece: Piece, index: int) -> dict[str, Any]:
    if piece.call is not None:
        return {"tool_calls": [{"index": index, **_call(piece.call)}]}
    return {"content": piece.content} if piece.content else {"reasoning_content": piece.reasoning}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
