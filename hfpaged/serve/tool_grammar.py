"""Grammars of answers that call tools, as each family of models writes them, and of answers behind a thought."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.serve.grammar import json_rule
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.tool_calls import AnswerForm
from hfpaged.serve.tool_choice import Tool

# Keywords of a schema that say of which type a value is.
_SAY_TYPES = {"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}
Terminal = Callable[[str], str]  # how a text stands in a grammar: as itself, or as the special token that it is


def call_grammar(
    tokenizer: PreTrainedTokenizerBase, form: AnswerForm, template: str, tools: Sequence[Tool], *, several: bool
) -> str:
    """Of an answer that calls one of `tools`, or several. Raises ApiError 422 where nobody here can write that down."""
    name = None if form.family is None else form.family.name
    write = _FAMILIES.get(name or "")
    if write is None:
        raise ApiError(
            422, f"this model writes tool calls as {name or 'its tokenizer says'}, and this server cannot hold it to "
            'that; use tool_choice="auto"', code="unsupported_tool_choice", param="tool_choice",
        )  # fmt: skip
    rules = write(_terminals(tokenizer), template, tools)
    return "start: " + (rules[0] if several else rules[1]) + "\n" + "\n".join(rules[2:])


def either(left: str, right: str) -> str:
    """One grammar or another."""
    return composed("start: @left | @right", left=left, right=right)


def behind_thought(
    tokenizer: PreTrainedTokenizerBase, grammar: str, thoughts: tuple[str, str], *, is_open: bool
) -> str:
    """A grammar for what comes when the model has thought; where that `is_open` it has begun in the prompt."""
    terminal, (opens, closes) = _terminals(tokenizer), thoughts
    end = terminal(closes)
    if end.startswith("<["):
        thought = f"thought: /(.|\\n)*/ {end}"
    else:
        escaped = re.escape(closes).replace("/", "\\/")
        thought = f"thought[lazy]: /(.|\\n)*{escaped}/"
    begin = "thought SPACE?" if is_open else f"({terminal(opens)} thought SPACE?)?"
    return composed(f"start: {begin} @answer\n{thought}\nSPACE: /[ \\n]{{1,4}}/", answer=grammar)


def composed(lark: str, **named: str) -> str:
    """A grammar of rules that refer to other grammars by @name."""
    found = [{"lark_grammar": lark}]
    for name, grammar in named.items():
        first, *rest = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        renamed = {part["name"]: f"{name}_{part['name']}" for part in rest}
        for part in ({**first, "name": name}, *({**part, "name": renamed[part["name"]]} for part in rest)):
            found.append(_referring(part, renamed))
    return json.dumps({"grammars": found})


def _referring(part: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    """Grammars that were composed before refer to others, which have new names now."""
    lark = part.get("lark_grammar")
    if not lark or not renamed:
        return part
    head, newline, rest = lark.partition("\n")  # of a composed one: the start rule
    return {**part, "lark_grammar": re.sub(r"@(\w+)", lambda m: "@" + renamed.get(m[1], m[1]), head) + newline + rest}


def _terminals(tokenizer: PreTrainedTokenizerBase) -> Terminal:
    special = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def terminal(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)

    return terminal


def _parameters(tool: Tool) -> dict[str, Any]:
    """A function's schema, which allows no arguments that it does not name, unless it says so or names none."""
    given = tool["function"].get("parameters") or {}
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **({"additionalProperties": False} if given.get("properties") else {}), **given}


def _moved(schema: Any, to: str) -> Any:
    """A schema that is a part of another one, where `to` says: its references to itself begin there."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + part[1:] if key == "$ref" and isinstance(part, str) and part.startswith("#") else _moved(part, to)
        for key, part in schema.items()
    }


def _object(tool: Tool, key: str) -> str:
    """{"name": ..., "arguments": {...}}."""
    arguments = _moved(_parameters(tool), f"#/properties/{key}")
    properties = {"name": {"const": tool["function"]["name"]}, key: arguments}
    return json_rule(
        {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
    )


def _rules(bodies: Sequence[str]) -> list[str]:
    """`body`: one of them."""
    names = " | ".join(f"body_{number}" for number in range(len(bodies)))
    return [f"body: {names}", *(f"body_{number}: {body}" for number, body in enumerate(bodies))]


def _hermes(terminal: Terminal, template: str, tools: Sequence[Tool]) -> list[str]:
    call = f'call: {terminal("<tool_call>")} "\\n" body "\\n" {terminal("</tool_call>")}'
    return ['call ("\\n" call)*', "call", call, *_rules([_object(tool, "arguments") for tool in tools])]


def _llama(terminal: Terminal, template: str, tools: Sequence[Tool]) -> list[str]:
    return ["body", "body", *_rules([_object(tool, "parameters") for tool in tools])]


def _listed(opens: str) -> Callable[[Terminal, str, Sequence[Tool]], list[str]]:
    def write(terminal: Terminal, template: str, tools: Sequence[Tool]) -> list[str]:
        start = f'{terminal(opens)} "[" body'
        rules = _rules([_object(tool, "arguments") for tool in tools])
        return [f'{start} ("," " "? body)* "]"', f'{start} "]"', *rules]

    return write


def _mistral(terminal: Terminal, template: str, tools: Sequence[Tool]) -> list[str]:
    if "[ARGS]" not in template:
        return _listed("[TOOL_CALLS]")(terminal, template, tools)
    bodies = [
        f"{terminal(tool['function']['name'])} {terminal('[ARGS]')} arguments_{number}"
        for number, tool in enumerate(tools)
    ]
    arguments = [f"arguments_{number}: {json_rule(_parameters(tool))}" for number, tool in enumerate(tools)]
    return ["call+", "call", f"call: {terminal('[TOOL_CALLS]')} body", *_rules(bodies), *arguments]


def _deepseek(terminal: Terminal, template: str, tools: Sequence[Tool]) -> list[str]:
    fenced = "```json" in template
    before, after = ('"\\n```json\\n"', '"\\n```"') if fenced else ("", "")
    kind = '"function" ' if fenced else ""
    separator = terminal("<｜tool▁sep｜>")
    bodies, arguments = [], []
    for number, tool in enumerate(tools):
        name = terminal(tool["function"]["name"])
        head = f"{kind}{separator} {name}" if fenced else f"{name} {separator}"
        bodies.append(f"{head} {before} arguments_{number} {after}")
        arguments.append(f"arguments_{number}: {json_rule(_parameters(tool))}")
    call = f"call: {terminal('<｜tool▁call▁begin｜>')} body {terminal('<｜tool▁call▁end｜>')}"
    first, last = terminal("<｜tool▁calls▁begin｜>"), terminal("<｜tool▁calls▁end｜>")
    return [f'{first} call ("\\n"? call)* {last}', f"{first} call {last}", call, *_rules(bodies), *arguments]


def _qwen3_coder(terminal: Terminal, template: str, tools: Sequence[Tool]) -> list[str]:
    """Texts of arguments go up to the first "<": what closes them cannot be told from what they contain."""
    bodies, rules = [], []
    for number, tool in enumerate(tools):
        schema = _parameters(tool)
        parts = []
        for place, (key, value) in enumerate((schema.get("properties") or {}).items()):
            rule = f"value_{number}_{place}"
            rules.append(f"{rule}: " + _plain(value, schema))
            part = f'{terminal(f"<parameter={key}>")} "\\n" {rule} "\\n</parameter>\\n"'
            parts.append(part if key in (schema.get("required") or ()) else f"({part})?")
        head = json.dumps(f"<function={tool['function']['name']}>\n", ensure_ascii=False)
        bodies.append(f'{head} {" ".join(parts)} "</function>"')
    call = f'call: {terminal("<tool_call>")} "\\n" body "\\n" {terminal("</tool_call>")}'
    return ['call ("\\n" call)*', "call", call, *_rules(bodies), *rules]


def _plain(value: Any, schema: Mapping[str, Any]) -> str:
    """Of an argument of a function with this schema: a text as it is, all else as JSON."""
    if not isinstance(value, Mapping):  # true: anything
        return json_rule({"anyOf": [value]})
    is_text = value.get("type") == "string" and not any(key in value for key in ("enum", "const"))
    if is_text or not value.keys() & _SAY_TYPES:
        return _plain_text(value)
    return _plain_value({**value, **{key: schema[key] for key in ("$defs", "definitions") if key in schema}})


def _plain_text(schema: Mapping[str, Any]) -> str:
    """Not empty, and without a line break at its end."""
    longest = schema.get("maxLength")
    count = f"{{0,{longest - 1}}}" if isinstance(longest, int) and longest > 0 else "*"
    return f"/[^<]{count}[^<\\n]/"


def _plain_value(schema: dict[str, Any]) -> str:
    """Texts of a choice stand without quotes, all else as JSON."""
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if options and all(isinstance(option, str) for option in options):
        return " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return json_rule(schema)


_FAMILIES: dict[str, Callable[[Terminal, str, Sequence[Tool]], list[str]]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "granite": _listed("<|tool_call|>"),
}
