"""What /v1/responses takes, and what it gives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from hfpaged.serve.schemas.answers import Answer, CachedTokens
from hfpaged.serve.schemas.sampling import SamplingBody

_ITEM = {"type": "object", "properties": {"type": {"type": "string"}, "role": {"type": "string"}}}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
    },
    "required": ["type", "name"],
}


def _or_null(*schemas: Any) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}]})


# Read where the prompt is made: see hfpaged.serve.responses_input.
Input = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]})
]
Tools = Annotated[Any, _or_null({"type": "array", "items": _TOOL})]
Choice = Annotated[Any, _or_null({"enum": ["none", "auto", "required"]}, {"type": "object"})]
Format = Annotated[Any, _or_null({"type": "object", "properties": {"format": {"type": ["object", "null"]}}})]


class ResponsesBody(SamplingBody):
    """A conversation that the model answers, as items."""

    input: Input = Field(description="A text, or items: messages, function calls and their outputs.")
    instructions: str | None = Field(None, description="What the system says before all else.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="The most new tokens; default: what there is room for."
    )
    tools: Tools = Field(None, description="Functions that the model may call.")
    tool_choice: Choice = Field(None, description="Whether it may (auto, the default), must (required, or one by name)")
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer (default).")
    text: Format = Field(None, description='{"format": ...}: text, json_object or json_schema.')
    metadata: dict[str, str] | None = Field(None, description="Given back as it is.")
    store: bool | None = Field(None, description="Not used: nothing is kept.")
    previous_response_id: str | None = Field(None, description="Not supported, as nothing is kept.")
    conversation: Annotated[Any, _or_null({"type": "string"}, {"type": "object"})] = Field(
        None, description="Not supported, as nothing is kept."
    )
    background: bool | None = Field(None, description="Not supported.")


class OutputTokens(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


class ResponseEvent(Answer):
    """The data of one event; its name is `type` too."""

    type: str
    sequence_number: int
