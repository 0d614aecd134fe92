"""What /v1/completions takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from hfpaged.serve.schemas.formats import FormatBody
from hfpaged.serve.schemas.sampling import MOST_LOGPROBS, SamplingBody

MOST_PROMPTS = 1024  # of one request: who has more sends several
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, as a list of them."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > MOST_PROMPTS:
        raise ValueError(f"has {len(value)} prompts, and one request may have {MOST_PROMPTS}")
    if isinstance(value, list) and value and (set(map(type, value)) == {str} or all(map(_is_ids, value))):
        return value
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


class CompletionBody(FormatBody, SamplingBody):
    """Texts or token ids that go on."""

    prompt: Prompts = Field(description="What goes on; of several prompts each has n choices, in their order.")
    max_tokens: int | None = Field(16, ge=0, description="The most new tokens. null: what the context leaves.")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="Of each token, and of so many of the likeliest ones."
    )
    echo: bool | None = Field(None, description="The prompt comes first; with logprobs those of its tokens too.")
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(None, description="Of a prompt that is text (default).")
