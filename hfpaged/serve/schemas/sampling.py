"""Fields that all endpoints share which generate."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

MOST_LOGPROBS = 20  # alternatives of a token: OpenAI's own limit, and an answer of more is mostly numbers

MOST_BIAS = 100  # OpenAI's own limit; what bans tokens may be less than -100
MOST_STOPS = 64  # texts: each of them is looked for at each new token of the answer, while all others wait


class Body(BaseModel):
    """JSON of a client. Unknown fields are let in; numbers are numbers and not texts of numbers."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send the usage in a last chunk that has no choices.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk has the usage so far."
    )


def _stop(value: Any) -> list[str] | None:
    found = [value] if isinstance(value, str) else value
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise ValueError("must be a text of at least one character, or a list of such texts")
    if len(found) > MOST_STOPS:
        raise ValueError(f"has {len(found)} texts, and may have {MOST_STOPS}")
    return found


Stop = Annotated[
    list[str] | None,
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MOST_STOPS},
                {"type": "null"},
            ]
        }
    ),
]


def _logit_bias(value: Any) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(type(bias) in (int, float) for bias in value.values()):
        raise ValueError("must be an object that has a number for each token id")
    if not all(bias <= MOST_BIAS for bias in value.values()):  # NaN too
        raise ValueError(f"must have numbers of at most {MOST_BIAS}")
    try:
        return {token: float(bias) for token, bias in value.items()}
    except OverflowError:
        raise ValueError("must have numbers that a float can hold") from None


# Read in one go, as lists are `fail_fast`: pydantic would tell of each entry that is wrong, and of the very many that a
# body has room for it would do so for seconds, in which nobody else is answered.
LogitBias = Annotated[
    dict[str, float] | None,
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number", "maximum": MOST_BIAS}},
                {"type": "null"},
            ]
        }
    ),
]
TokenIds = list[Annotated[int, Field(ge=0)]]


class SamplingBody(Body):
    """What a request can say about how its tokens are chosen. None: as the model's generation_config says."""

    model: str | None = Field(None, description="A name that /v1/models tells; without one the model itself.")
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False, description="0: always the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1, description="Of the likeliest tokens, those with so much together.")
    top_k: int | None = Field(None, ge=-1, description="Of the so many likeliest tokens; 0 or -1: of all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Only tokens of this share of the likeliest one's.")
    n: int | None = Field(None, ge=1, description="How many answers.")
    best_of: int | None = Field(None, ge=1, description="Sample so many, and give the n best back.")
    stop: Stop = Field(None, description="Texts that end the answer and are not part of it.")
    stop_token_ids: TokenIds | None = Field(None, fail_fast=True, description="Tokens that end the answer.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave in the text what ended it.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default).")
    ignore_eos: bool | None = Field(None, description="Go on behind the model's end-of-sequence tokens.")
    min_tokens: int | None = Field(None, ge=0, description="No end-of-sequence token before so many.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="The same seed gives the same tokens.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="For each time a token was generated.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="For tokens that were generated.")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Divides the logits of tokens that are there; 1: none."
    )
    logit_bias: LogitBias = Field(None, description="Added to logits, by token id.")
    stream: bool | None = Field(None, description="Send the answer piece by piece, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    priority: int | None = Field(None, description="The smaller, the sooner (--scheduling-policy priority).")
    cache_salt: str | None = Field(
        None, min_length=1, description="Share prefixes only with requests of the same key that have it too."
    )
    return_tokens_as_token_ids: bool | None = Field(None, description='Logprobs name tokens as "token_id:17".')
    return_token_ids: bool | None = Field(None, description="Give token ids beside texts.")
    user: str | None = Field(None, description="Not used.")
