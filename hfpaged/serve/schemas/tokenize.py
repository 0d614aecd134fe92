"""What /tokenize and /detokenize take."""

from __future__ import annotations

from pydantic import Field

from hfpaged.serve.schemas.chat import Message, TemplateBody
from hfpaged.serve.schemas.sampling import Body, TokenIds


class TokenizeBody(TemplateBody):
    """Either `prompt`, a text, or `messages`, which the chat template makes one of."""

    model: str | None = Field(None, description="A name that /v1/models tells.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True, description="Instead, a conversation.")
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer's own ones besides; default: true for a prompt, false for messages."
    )
    return_token_strs: bool | None = Field(None, description="Give the text of each token too.")


class DetokenizeBody(Body):
    model: str | None = Field(None, description="A name that /v1/models tells.")
    tokens: TokenIds = Field(fail_fast=True, description="Token ids.")
