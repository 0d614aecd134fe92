"""Tools in messages, for chat templates that know nothing of them: told in the system's message, in Hermes' way."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hfpaged.serve.chat_messages import text_of

_INTRODUCTION = """You may call functions to help with what the user asks. They are, one a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def without_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """(messages, tools) for a chat template: what it knows nothing of stands in the messages as text, tools, calls and
    results. A call that is none stays, for whoever checks messages.
    """
    if "tool_calls" not in template:
        messages = [_as_text(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not tools or re.search(r"\btools\b", template):
        return messages, tools
    return _told(messages, tools), None


def _told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = [dict(message) for message in messages]
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    if found and found[0].get("role") in ("system", "developer"):
        first = text_of(found[0].get("content"), "messages[0].content")
        found[0]["content"] = f"{first}\n\n{introduction}" if first else introduction
        return found
    return [{"role": "system", "content": introduction}, *found]


def _as_text(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if message.get("role") == "tool":
        text = text_of(message.get("content"), f"{where}.content")
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or calls is None or not _are_calls(calls):
        return dict(message)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    parts = [text_of(message.get("content"), f"{where}.content"), *map(_call_text, calls)]
    return {**rest, "content": "\n".join(filter(None, parts))}


def _are_calls(calls: Any) -> bool:
    if not isinstance(calls, Sequence):
        return False
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    return bool(functions) and all(isinstance(f, Mapping) and isinstance(f.get("name"), str) for f in functions)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'
