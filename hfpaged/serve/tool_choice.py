"""Which tools a request tells the model of, and which of them it must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hfpaged.serve.grammar import check_size
from hfpaged.serve.http_errors import invalid

Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


class ToolChoice(NamedTuple):
    """`told`: those that the model hears of; `must`: those of which it has to call one, () where it may do without."""

    told: tuple[Tool, ...] = ()
    must: tuple[Tool, ...] = ()
    several: bool = True  # calls in one answer


def tool_choice_of(tools: Any, choice: Any = None, parallel: Any = None) -> ToolChoice:
    """From the fields `tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises ApiError 400."""
    known = _tools(tools)
    name = _chosen(choice)
    if name == "none":
        return ToolChoice()
    if name in ("auto", None) or not (known or name):
        return ToolChoice(known, (), parallel is not False)
    if not known:
        raise invalid("tool_choice wants a call, and there are no tools; send some, or leave it out", "tool_choice")
    if name == "required":
        return ToolChoice(known, known, parallel is not False)
    must = tuple(tool for tool in known if tool["function"]["name"] == name.removeprefix("function "))
    if not must:
        names = ", ".join(tool["function"]["name"] for tool in known)
        raise invalid(f"tool_choice names {name}, and the tools are {names}; choose one of them", "tool_choice")
    return ToolChoice(known, must, several=False)


def _chosen(choice: Any) -> str | None:
    """A word, or "function NAME"."""
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return choice
    inner = choice.get("function", choice) if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise invalid(
            'tool_choice is none, auto, required or {"type": "function", "function": {"name": "..."}}, not '
            f"{_short(choice)}", "tool_choice",
        )  # fmt: skip
    return f"function {name}"


def _tools(given: Any) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise invalid("tools is a list", "tools")
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(given))


def _tool(tool: Any, where: str) -> Tool:
    """In the shape of chat completions; /v1/responses has no level between."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise invalid(f'{where} is of type {kind!r}; this server knows tools of type "function" only', where)
    inner = tool.get("function", {key: value for key, value in tool.items() if key != "type"})
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name:
        raise invalid(f"{where} is a function without a name", where)
    parameters = inner.get("parameters")
    if not (parameters is None or isinstance(parameters, Mapping)):
        raise invalid(f"the parameters of {where} are a JSON schema, an object", where)
    if not isinstance((parameters or {}).get("properties") or {}, Mapping):
        raise invalid(f"the properties of the parameters of {where} are an object", where)
    check_size(parameters, where)
    return {"type": "function", "function": {key: value for key, value in inner.items() if value is not None}}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
