"""Answers taken apart as they come: content, what the model thought, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from hfpaged.serve.delimiters import Delimited
from hfpaged.serve.host_parser import HostParser
from hfpaged.serve.prose import Piece, Prose, ToolCall, joined, new_id
from hfpaged.serve.tool_bodies import Called, Tools, UnfinishedError
from hfpaged.serve.tool_families import HERMES, Family, family_of, thoughts_of


class Parser(Protocol):
    """Of one answer. Its pieces together are the same however the text is cut."""

    def feed(self, text: str) -> list[Piece]:
        """What is sure after some more text."""

    def end(self) -> list[Piece]:
        """The rest."""


@dataclass(frozen=True)
class AnswerForm:
    """How a model writes its answers to one request.

    family, thoughts   None where it writes no calls, or nothing of what it thinks
    silent             special tokens to be left out, where the text has any
    keeps_special      whether the text must have its special tokens, as there are delimiters among them
    host_template      what transformers' own parser of this tokenizer goes by; it is preferred
    """

    family: Family | None
    thoughts: tuple[str, str] | None
    silent: tuple[str, ...] = ()
    keeps_special: bool = False
    host_template: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether answers are content and nothing else."""
        return self.family is None and self.thoughts is None and self.host_template is None


def answer_form(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] | None) -> AnswerForm:
    """Known by the chat template. Where that says nothing of tools, calls are asked for in Hermes' way."""
    host = getattr(tokenizer, "response_template", None)
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    if host is not None:
        return AnswerForm(None, None, special, keeps_special=True, host_template=host)
    template = template_of(tokenizer, tools)
    family = (family_of(template) or HERMES) if tools else None
    thoughts = thoughts_of(template)
    wanted = {*(thoughts or ())}
    if family is not None:
        wanted |= {*family.opens, *family.inner, *family.silent, family.close or ""}
    keeps = any(token and token in text for token in special for text in wanted)
    return AnswerForm(family, thoughts, tuple(token for token in special if keeps and token not in wanted), keeps)


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> str:
    """The chat template, "" where there is none."""
    try:
        return str(tokenizer.get_chat_template(tools=list(tools) if tools else None))
    except ValueError:
        return ""


def parser_for(
    tokenizer: PreTrainedTokenizerBase, prompt_text: str, tools: Sequence[Mapping[str, Any]] | None = None,
    form: AnswerForm | None = None,
) -> Parser | None:  # fmt: skip
    """What takes one answer to a prompt apart; None where it is content and nothing else."""
    form = form or answer_form(tokenizer, tools)
    if form.host_template is not None:
        return HostParser(tokenizer, prompt_text, tools)
    return None if form.is_plain else ToolParser(form, prompt_text, properties_of(tools))


def properties_of(tools: Sequence[Mapping[str, Any]] | None) -> Tools:
    """The schemas of the arguments of each function."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {
        str(function.get("name")): (function.get("parameters") or {}).get("properties") or {} for function in functions
    }


def begins_in_thought(prompt_text: str, thoughts: tuple[str, str] | None) -> bool:
    """Whether the template has opened what the model thinks."""
    return thoughts is not None and prompt_text.rstrip().endswith(thoughts[0].rstrip())


class ToolParser:
    """By a family's delimiters."""

    def __init__(self, form: AnswerForm, prompt_text: str, tools: Tools) -> None:
        self._form, self._family, self._tools = form, form.family, tools
        self._text = Delimited()
        self._content, self._thought = Prose(), Prose(strips=True)
        self._is_thinking = begins_in_thought(prompt_text, form.thoughts)
        self._is_first = True  # no content, no call yet
        self._opened: str | None = None  # inside of a call: what stood before it, and what it began with
        self._body = ""

    def feed(self, text: str) -> list[Piece]:
        self._text.feed(text)
        return self._pieces(is_last=False)

    def end(self) -> list[Piece]:
        found = self._pieces(is_last=True)
        if self._opened is not None:
            found += self._close("", is_last=True)
        return joined([*found, Piece(content=self._content.finish())])

    def _pieces(self, is_last: bool) -> list[Piece]:
        found: list[Piece] = []
        while True:
            text, delimiter = self._text.take(self._watched(), is_last=is_last)
            found += self._take_text(text)
            if delimiter is None:
                return joined(found)
            found += self._take_delimiter(delimiter)

    def _watched(self) -> Iterable[str]:
        """The delimiters that mean something here."""
        silent, family, thoughts = self._form.silent, self._family, self._form.thoughts
        if self._is_thinking:
            assert thoughts is not None
            return (thoughts[1], *silent)
        if self._opened is not None:
            assert family is not None
            return (family.close, *silent) if family.close else (*family.opens, *family.silent, *silent)
        # What means something at the start only is found everywhere, so that it is the same however the text is cut.
        watched = silent if family is None else (*family.opens, *family.silent, *family.starts, *silent)
        return (*watched, *(thoughts[:1] if thoughts else ()))

    def _take_text(self, text: str) -> list[Piece]:
        if self._is_thinking:
            return [Piece(reasoning=self._thought.add(text))]
        if self._opened is not None:
            self._body += text
            return []
        self._is_first = self._is_first and not text.strip()
        return [Piece(content=self._content.add(text))]

    def _take_delimiter(self, delimiter: str) -> list[Piece]:
        family, thoughts = self._family, self._form.thoughts
        if delimiter in self._form.silent or (family and delimiter in family.silent):
            return []
        if thoughts and delimiter in thoughts:
            if not self._is_thinking and not self._is_first:
                return [Piece(content=self._content.add(delimiter))]
            self._is_thinking = delimiter == thoughts[0]
            self._content.cut()
            return []
        assert family is not None
        if self._opened is None:
            return self._open(delimiter)
        found = self._close(delimiter if family.close else "")
        return found if family.close else found + self._open(delimiter)

    def _open(self, delimiter: str) -> list[Piece]:
        family = self._family
        assert family is not None
        if delimiter in family.starts and not self._is_first:  # not at the start of the answer: plain text
            return [Piece(content=self._content.add(delimiter))]
        is_start = delimiter in family.starts
        self._opened = self._content.cut() + ("" if is_start else delimiter)
        self._body = delimiter if is_start else ""
        self._is_first = False
        return []

    def _close(self, delimiter: str, *, is_last: bool = False) -> list[Piece]:
        """The calls that have ended; what is none comes back as content, as it was written."""
        family, opened = self._family, self._opened
        assert family is not None
        assert opened is not None
        try:
            calls = self._read(family)
        except UnfinishedError:
            if not is_last and delimiter:
                self._body += delimiter
                return []
            calls = []
        except (ValueError, TypeError, RecursionError):
            calls = []
        self._opened = None
        if calls:
            return [Piece(call=ToolCall(new_id(family.id_length), *call)) for call in calls]
        self._content.uncut()
        return [Piece(content=self._content.add(opened + self._body + delimiter))]

    def _read(self, family: Family) -> list[Called]:
        return family.read(self._body.strip(), self._tools)
