"""What /v1/chat/completions takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator
from typing_extensions import Required, TypedDict

from hfpaged.serve.chat_messages import TEXT_OF
from hfpaged.serve.schemas.formats import FormatBody
from hfpaged.serve.schemas.generation_config import GivenConfig, heeding_config
from hfpaged.serve.schemas.sampling import MOST_LOGPROBS, Body, SamplingBody

_PART = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": [kind]}, key: {"type": "string"}},
            "required": ["type", key],
        }
        for kind, key in TEXT_OF.items()
    ]
    + [{"type": "string"}]
}
# Read where the prompt is made, which says which message is wrong: see hfpaged.serve.chat_messages.
Content = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]})
]
ToolCalls = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]})
]


class Message(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    role: Required[Annotated[str, Field(min_length=1, examples=["system", "user", "assistant", "tool"])]]
    content: Content
    name: str | None
    tool_calls: ToolCalls
    tool_call_id: str | None


_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_CHOSEN = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": {"type": "object"}},
    "required": ["type", "function"],
}
# Read where the prompt is made: see hfpaged.serve.tool_choice.
Tools = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]})]
Choice = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _CHOSEN, {"type": "null"}]})]


class TemplateBody(Body):
    """How messages become a prompt."""

    tools: Tools = Field(None, description="Functions that the model may call.")
    tool_choice: Choice = Field(None, description="Whether it may (auto, the default), must (required, or one by name)")
    add_generation_prompt: bool | None = Field(None, description="End with what begins an answer (default).")
    continue_final_message: bool | None = Field(None, description="Go on with the last message instead.")
    add_special_tokens: bool | None = Field(None, description="Besides those that the template writes; default false.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    chat_template: str | None = Field(None, description="Not supported: the model's own template is used.")


class ChatBody(TemplateBody, FormatBody, SamplingBody):
    """A conversation that the model answers."""

    messages: list[Message] = Field(min_length=1, fail_fast=True, description="The conversation, the oldest first.")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer (default).")
    max_tokens: int | None = Field(None, ge=1, description="The most new tokens; default: what the context leaves.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Tell the logprob of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="With logprobs: those of so many of the likeliest tokens."
    )
    generation_config: GivenConfig = Field(
        None, description="Of transformers' own client: speaks where the fields beside it are silent."
    )

    @model_validator(mode="before")
    @classmethod
    def _heed_config(cls, body: Any) -> Any:
        return heeding_config(body)
