"""What stands between the delimiters of a tool call, read: a function for each way that models write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

Properties = Mapping[str, Mapping[str, Any]]  # schemas of arguments by their names
Tools = Mapping[str, Properties]  # those of each function


class Called(NamedTuple):
    """A function, and its arguments as an object of JSON in text."""

    name: str
    arguments: str


class UnfinishedError(ValueError):
    """The delimiter was a part of an argument: the call goes on behind it."""


def json_calls(body: str, tools: Tools) -> list[Called]:
    """{"name": "f", "arguments": {...}}, or a list of such; "parameters" is another word. Raises ValueError."""
    found = _json(body)
    return [_called(item) for item in (found if isinstance(found, list) else [found])]


def bare_json_calls(body: str, tools: Tools) -> list[Called]:
    """The same with nothing around it, several with ";" between: so that only known functions count."""
    decoder, place, found = json.JSONDecoder(), 0, []
    while place < len(body):
        value, place = decoder.raw_decode(body, place)
        found.append(_called(value))
        place = re.compile(r"[\s;]*").match(body, place).end()  # type: ignore[union-attr]
    if any(call.name not in tools for call in found):
        raise ValueError("no function of this request")
    return found


def named_calls(body: str, tools: Tools) -> list[Called]:
    """Mistral's: a list of JSON, or since 2025 `name{...}`, `name[ARGS]{...}` with perhaps [CALL_ID] before that."""
    body = body.strip()
    if body.startswith(("[", "{")):
        return json_calls(body, tools)
    match = re.fullmatch(r"([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*)", body, re.DOTALL)
    if match is None:
        raise ValueError("no name with arguments")
    return [Called(match[1], _object_text(_json(match[2])))]


def separated_calls(body: str, tools: Tools) -> list[Called]:
    """DeepSeek's: `name<｜tool▁sep｜>{...}`, or `function<｜tool▁sep｜>name` and the arguments between fences."""
    head, separator, rest = body.partition("<｜tool▁sep｜>")
    fenced = re.fullmatch(r"\s*([^\n]+?)\s*\n```json\n(.*?)\n?```\s*", rest, re.DOTALL)
    name, arguments = fenced.groups() if fenced else (head, rest)
    if not separator or not name.strip():
        raise ValueError("no name with arguments")
    return [Called(name.strip(), _object_text(_json(arguments)))]


def xml_calls(body: str, tools: Tools) -> list[Called]:
    """Qwen3-Coder's: <function=name><parameter=key>value</parameter></function>; types are those of the schema."""
    match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
    if match is None:
        raise UnfinishedError("no end of the function")
    name = match[1].strip()
    pattern = r"<parameter=([^>\n]+)>(.*?)</parameter>"
    given = re.findall(pattern, match[2], re.DOTALL)
    if re.sub(pattern, "", match[2], flags=re.DOTALL).strip():
        raise ValueError("something besides parameters")
    known = tools.get(name, {})
    arguments = {key.strip(): _typed(_without_newlines(value), known.get(key.strip())) for key, value in given}
    return [Called(name, json.dumps(arguments, ensure_ascii=False))]


_GEMMA_TOKEN = re.compile(r'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>|("(?:\\.|[^"\\])*")|([A-Za-z_][\w.-]*)(?=\s*:)',
                          re.DOTALL)  # fmt: skip


def gemma_calls(body: str, tools: Tools) -> list[Called]:
    """Gemma's: call:name{key:<|"|>text<|"|>,other:1}: keys without quotes, and texts in marks of their own."""
    match = re.fullmatch(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if match is None:
        raise ValueError("no call:name{...}")

    def quoted(token: re.Match[str]) -> str:
        return token[3] or json.dumps(next(part for part in token.groups() if part is not None))

    return [Called(match[1], _object_text(_json(_GEMMA_TOKEN.sub(quoted, match[2]))))]


def _called(item: Any) -> Called:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
        raise ValueError("no name")
    return Called(item["name"], _object_text(item.get("arguments", item.get("parameters", {}))))


def _object_text(arguments: Any) -> str:
    """As text; some models write the object as a text themselves."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return json.dumps(value, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnfinishedError(str(error)) from error
        raise


def _without_newlines(value: str) -> str:
    """A value stands on lines of its own: the first and the last line break are not of it."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(text: str, schema: Any) -> Any:
    """A text where the schema allows that; else what it says as JSON or as Python."""
    kinds = _kinds(schema) if isinstance(schema, Mapping) else set()
    if not kinds or kinds == {"string"}:
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        value = json.loads(word)
    except ValueError:
        return text
    return text if "string" in kinds and _kind_of(value) not in kinds else value


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Types that a value may have. What stands elsewhere ($ref) may have any."""
    if "$ref" in schema or "allOf" in schema:
        return {"null", "boolean", "integer", "number", "string", "array", "object"}
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds |= _kinds(option)
    return kinds | {"integer"} if "number" in kinds else kinds


def _kind_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
