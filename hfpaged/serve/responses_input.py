"""Items of /v1/responses as messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfpaged.serve.chat_messages import text_of
from hfpaged.serve.http_errors import invalid

Message = dict[str, Any]


def messages_of(given: Any, instructions: str | None) -> list[Message]:
    """`given`: a text, or a list of items. Raises ApiError 400, whose `param` says which of them is wrong."""
    if isinstance(given, str):
        found: list[Message] = [{"role": "user", "content": given}]
    elif isinstance(given, list) and given:
        found = []
        for index, item in enumerate(given):
            _add(found, item, f"input[{index}]")
    else:
        raise invalid("input is a text, or a list of one or more items", "input")
    return found if not instructions else _instructed(found, instructions)


def _instructed(messages: list[Message], instructions: str) -> list[Message]:
    """Many templates know one message of the system's only."""
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": instructions}, *messages]
    first, *rest = messages
    return [{**first, "content": f"{instructions}\n\n{first['content']}"}, *rest]


def _add(messages: list[Message], item: Any, where: str) -> None:
    if not isinstance(item, Mapping):
        raise invalid(f"{where} is an object", where)
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or not role:
            raise invalid(f"{where}.role is one of system, developer, user and assistant", f"{where}.role")
        messages.append({"role": role, "content": text_of(item.get("content"), f"{where}.content")})
    elif kind == "function_call":
        _add_call(messages, item, where)
    elif kind == "function_call_output":
        output = text_of(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # which templates take from earlier answers, or leave out
        raise invalid(
            f"{where} is of type {kind!r}; this server reads message, function_call, function_call_output and "
            "reasoning", where,
        )  # fmt: skip


def _add_call(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Calls of one answer are one message."""
    name, arguments = item.get("name"), item.get("arguments", "{}")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise invalid(f"{where} has a name, and arguments that are JSON in a text", where)
    call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant":
        last = {"role": "assistant", "content": None}
        messages.append(last)
    last.setdefault("tool_calls", []).append(call)
