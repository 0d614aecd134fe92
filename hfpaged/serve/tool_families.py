"""How families of models write tool calls and what they think, and by what of a chat template they are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hfpaged.serve import tool_bodies
from hfpaged.serve.tool_bodies import Called, Tools

Reader = Callable[[str, Tools], list[Called]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One way to write.

    marks     what a chat template of it contains, all of them
    opens     what a call begins with; without `close` it goes on to the next one or to the end
    read      what stands between
    starts    what makes a whole answer a call if it begins so
    inner     special tokens that `read` wants to see
    silent    what stands around calls and says nothing
    id_length characters of a call's id, where templates insist
    """

    name: str
    marks: tuple[str, ...]
    opens: tuple[str, ...]
    close: str | None = None
    read: Reader = tool_bodies.json_calls
    starts: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    id_length: int | None = None


HERMES = Family(name="hermes", marks=("<tool_call>",), opens=("<tool_call>",), close="</tool_call>")

# The first whose marks are there: the more special ones come before those that they would be taken for.
FAMILIES = (
    Family(
        name="gemma4", marks=("<|tool_call>",), opens=("<|tool_call>",), close="<tool_call|>",
        read=tool_bodies.gemma_calls, inner=('<|"|>',),
    ),
    Family(
        name="functiongemma", marks=("<start_function_call>",), opens=("<start_function_call>",),
        close="<end_function_call>", read=tool_bodies.gemma_calls, inner=("<escape>",),
    ),
    Family(
        name="deepseek", marks=("<｜tool▁call▁begin｜>",), opens=("<｜tool▁call▁begin｜>",),
        close="<｜tool▁call▁end｜>", read=tool_bodies.separated_calls, inner=("<｜tool▁sep｜>",),
        silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Family(
        name="qwen3_coder", marks=("<tool_call>", "<function="), opens=("<tool_call>",), close="</tool_call>",
        read=tool_bodies.xml_calls,
    ),
    HERMES,
    Family(
        name="mistral", marks=("[TOOL_CALLS]",), opens=("[TOOL_CALLS]",), read=tool_bodies.named_calls,
        inner=("[ARGS]", "[CALL_ID]"), id_length=9,
    ),
    Family(name="granite", marks=("<|tool_call|>",), opens=("<|tool_call|>",), silent=("<|/tool_call|>",)),
    Family(
        name="llama3_json", marks=("<|python_tag|>",), opens=("<|python_tag|>",), starts=("{",),
        read=tool_bodies.bare_json_calls,
    ),
    Family(
        name="llama3_json", marks=('"parameters": dictionary',), opens=(), starts=("{",),
        read=tool_bodies.bare_json_calls,
    ),
)  # fmt: skip

# What a model thinks stands between these: the first pair whose first part the chat template contains.
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))


def family_of(template: str) -> Family | None:
    """The family that a chat template is of; None where it knows of no tools, or writes calls as nobody here reads."""
    return next((family for family in FAMILIES if all(mark in template for mark in family.marks)), None)


def thoughts_of(template: str) -> tuple[str, str] | None:
    """What stands around what the model thinks, None where its template says nothing of that."""
    return next((pair for pair in THOUGHTS if pair[0] in template), None)
