"""What a conversation's answer is to be, and how it is read: tools, format, thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hfpaged.serve.chat_prompt import ChatPrompt
from hfpaged.serve.grammar import grammar_of
from hfpaged.serve.grammar_processor import grammar_processor
from hfpaged.serve.prose import Piece
from hfpaged.serve.service import Service
from hfpaged.serve.tool_calls import AnswerForm, Parser, answer_form, begins_in_thought, parser_for, template_of
from hfpaged.serve.tool_choice import ToolChoice
from hfpaged.serve.tool_grammar import behind_thought, call_grammar, either


class AnswerPlan(NamedTuple):
    """Of one request; `settings` are for the engine."""

    prompt: ChatPrompt
    choice: ToolChoice
    form: AnswerForm
    settings: dict[str, Any]

    def pieces(self, service: Service) -> Pieces | None:
        """What takes one answer apart, None where it is content and nothing else."""
        parser = parser_for(service.tokenizer, self.prompt.text, self.choice.told, self.form)
        return None if parser is None else Pieces(parser, several=self.choice.several)


class Pieces:
    """Of one answer, as it comes."""

    def __init__(self, parser: Parser, *, several: bool) -> None:
        self._parser, self._several = parser, several
        self.num_calls = 0

    def new(self, text: str, *, is_last: bool) -> list[Piece]:
        """What is sure after some more text. Of several calls only the first, where no more are wanted."""
        found = self._parser.feed(text) + (self._parser.end() if is_last else [])
        return [piece for piece in found if piece.call is None or self._is_wanted()]

    def _is_wanted(self) -> bool:
        self.num_calls += 1
        return self._several or self.num_calls == 1

    def finish_reason(self, reason: str | None) -> str | None:
        """The API's word for how the answer ended."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason


def plan_answer(
    service: Service, prompt: ChatPrompt, choice: ToolChoice, formats: Mapping[str, Any]
) -> AnswerPlan:  # fmt: skip
    """`formats`: fields that ask for a format (see `grammar_of`). It may take 100 ms: call it in a thread.

    Raises ApiError 400 and 422.
    """
    form = answer_form(service.tokenizer, choice.told)
    settings: dict[str, Any] = {"skip_special_tokens": False} if form.keeps_special else {}
    grammar = _grammar(service, prompt, choice, form, formats)
    if grammar is not None:
        param = "tools" if choice.must else "response_format"
        settings["logits_processor"] = grammar_processor(service.tokenizer, service.batcher.model, grammar, param)
    return AnswerPlan(prompt, choice, form, settings)


def _grammar(
    service: Service, prompt: ChatPrompt, choice: ToolChoice, form: AnswerForm, formats: Mapping[str, Any]
) -> str | None:
    """A call where there must be one; else the format, or instead of it a call where there are tools. A model that
    thinks may do so first.
    """
    grammar = grammar_of(formats)
    if choice.must or (grammar is not None and choice.told):
        template = template_of(service.tokenizer, choice.told)
        tools, several = choice.must or choice.told, choice.several
        calls = call_grammar(service.tokenizer, form, template, tools, several=several)
        grammar = calls if choice.must or grammar is None else either(calls, grammar)
    if grammar is None or form.thoughts is None:
        return grammar
    is_open = begins_in_thought(prompt.text, form.thoughts)
    return behind_thought(service.tokenizer, grammar, form.thoughts, is_open=is_open)
