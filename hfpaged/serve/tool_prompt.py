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


def knows_tools(template: str) -> bool:
    """Whether a chat template does anything with tools."""
    return re.search(r"\btools\b", template) is not None


def told_in_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with `tools`, calls and results as text."""
    found = [_as_text(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not tools:
        return found
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
    if message.get("role") != "assistant" or not isinstance(calls, Sequence) or not calls:
        return dict(message)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    parts = [text_of(message.get("content"), f"{where}.content"), *map(_call_text, calls)]
    return {**rest, "content": "\n".join(filter(None, parts))}


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'
