"""Messages as OpenAI's clients send them, made into what chat templates expect: content as one text, arguments of tool
calls as objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hfpaged.serve.http_errors import ApiError

# Kinds of parts that are text, and the key of it.
TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: Iterable[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """`messages` as `template` reads them. Raises ApiError 400, whose `param` says which of them is wrong.

    A developer's message becomes the system's where the template knows no developers.
    """
    found = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not found:
        raise ApiError(400, "messages is empty; send one at least", code="invalid_value", param="messages")
    if "developer" not in template:
        for message in found:
            if message["role"] == "developer":
                message["role"] = "system"
    return found


def text_of(content: Any, where: str) -> str:
    """Content that is a text, None, or a list of parts that are texts, as one text. `where` is its name in errors."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        raise _invalid(where, "is a text or a list of parts")
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in TEXT_OF:
        raise _invalid(
            where, f"has the type {kind!r}, and this server reads text only; send parts like "
            '{"type": "text", "text": "..."}',
        )  # fmt: skip
    text = part.get(TEXT_OF[kind])
    if not isinstance(text, str):
        raise _invalid(f"{where}.{TEXT_OF[kind]}", "is a text")
    return text


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role", "is one of system, developer, user, assistant and tool")
    if message.get("content") is None and role != "assistant":
        raise _invalid(f"{where}.content", "is a text or a list of parts")
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = text_of(message.get("content"), f"{where}.content")
    if found.get("tool_calls"):
        found["tool_calls"] = _tool_calls(found["tool_calls"], where)
    return found


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise _invalid(f"{where}.tool_calls", "is a list of calls")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Templates print arguments as JSON themselves, so that text of JSON would come out quoted twice."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"{where}.tool_calls", 'has calls like {"type": "function", "function": {"name": "..."}}')
    arguments = function.get("arguments", {})
    return {**call, "function": {**function, "arguments": _object(arguments)}}


def _object(arguments: Any) -> Any:
    """What a model has written need not be JSON: it stays as it is then."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _invalid(where: str, rule: str) -> ApiError:
    return ApiError(400, f"{where} {rule}", code="invalid_value", param=where)
