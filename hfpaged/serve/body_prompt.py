"""From the bodies of requests to prompts: all that a tokenizer is needed for, and no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.serve.chat_prompt import ChatPrompt, chat_prompt
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.responses_input import messages_of
from hfpaged.serve.schemas.chat import TemplateBody
from hfpaged.serve.schemas.completion import CompletionBody
from hfpaged.serve.schemas.responses import ResponsesBody
from hfpaged.serve.tool_choice import ToolChoice, tool_choice_of


def prompt_of_messages(
    messages: Sequence[Mapping[str, Any]], body: TemplateBody, tokenizer: PreTrainedTokenizerBase,
    choice: ToolChoice | None = None,
) -> ChatPrompt:  # fmt: skip
    """The prompt that messages make, as `body` says; `choice` is what it says of tools, where that has been read.

    Raises ApiError.
    """
    choice = choice or tool_choice_of(body.tools, body.tool_choice)
    if body.chat_template is not None:
        raise ApiError(400, "this server writes prompts by the model's own chat template only; leave chat_template out",
                       code="unsupported", param="chat_template")  # fmt: skip
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    return chat_prompt(
        tokenizer, messages, add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues, add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs, tools=choice.told,
    )  # fmt: skip


def prompt_of_items(body: ResponsesBody, tokenizer: PreTrainedTokenizerBase, choice: ToolChoice) -> ChatPrompt:
    """The prompt of /v1/responses. Raises ApiError, which speaks of messages."""
    return chat_prompt(tokenizer, messages_of(body.input, body.instructions), tools=choice.told)


def prompt_of_text(
    prompt: str | list[int], body: CompletionBody, tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> list[int]:
    """The token ids of one prompt of /v1/completions; for those that are ids already no tokenizer is asked for.

    Raises what `tokenizer` raises.
    """
    if isinstance(prompt, list):
        return prompt
    token_ids: list[int] = tokenizer()(prompt, add_special_tokens=body.add_special_tokens is not False)["input_ids"]
    return token_ids
