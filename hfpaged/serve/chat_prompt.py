"""From messages to token ids, by the model's own chat template."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from hfpaged.serve.chat_messages import template_messages
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.tool_prompt import without_tools


class ChatPrompt(NamedTuple):
    """`text` is what the template has written, `token_ids` that text in tokens."""

    text: str
    token_ids: list[int]


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *,
    tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
    continue_final_message: bool = False, add_special_tokens: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:  # fmt: skip
    """The prompt of a conversation. It takes milliseconds: call it in a thread, as `Service.begin` does.

    Args:
        messages: as clients send them; content may be a list of parts of text.
        tools: as clients send them. Where the template knows nothing of tools they are told in the system's message.
        add_generation_prompt: end with what begins the assistant's answer.
        continue_final_message: instead, leave the last message open, so that the answer goes on with it.
        add_special_tokens: let the tokenizer add its own, which most templates have written already.
        template_kwargs: more variables for the template, such as enable_thinking.

    Raises ApiError: 422 where the model has no chat template, 400 for messages that the template refuses.
    """
    template = chat_template_of(tokenizer, tools)
    if add_generation_prompt and continue_final_message:
        raise ApiError(
            400, "add_generation_prompt begins a new answer and continue_final_message goes on with the last message; "
            "set one of them to false", code="invalid_value", param="continue_final_message",
        )  # fmt: skip
    _check_kwargs(template_kwargs or {})
    try:
        messages, tools = without_tools(messages, tools, template)
        conversation = template_messages(messages, template)
        text: str = tokenizer.apply_chat_template(
            conversation, tools=list(tools) if tools else None, tokenize=False,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )  # fmt: skip
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ApiError(
            400, f"the model's chat template refuses these messages: {error}", code="invalid_messages", param="messages"
        ) from error
    return ChatPrompt(text, tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def chat_template_of(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> str:
    """The template that messages (with `tools` or without) are written by. Raises ApiError 422 where there is none."""
    try:
        template: str = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    except ValueError as error:
        raise ApiError(
            422, "this model has no chat template; use /v1/completions with a prompt, or serve it with a tokenizer "
            "whose chat_template is set", code="no_chat_template", param="messages",
        ) from error  # fmt: skip
    return template


def _check_kwargs(given: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for names that are no variables of a template: they would change what is done with it."""
    for name in given:
        if name in _taken_names():
            raise ApiError(
                400, f"chat_template_kwargs has {name!r}, which is no variable of a chat template; leave it out",
                code="invalid_value", param="chat_template_kwargs",
            )  # fmt: skip


@functools.cache
def _taken_names() -> frozenset[str]:
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(parameters) | {"messages", "conversations"}
