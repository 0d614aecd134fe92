"""From fields of a request to settings of the engine, and from what the engine refuses back to those fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from hfpaged.engine.room import most_new_tokens
from hfpaged.errors import InvalidConfigError, RequestTooLongError
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.schemas.sampling import SamplingBody
from hfpaged.serve.service import Service

_AS_THEY_ARE = (
    "n", "best_of", "stop", "include_stop_str_in_output", "skip_special_tokens", "min_tokens", "seed",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "priority", "cache_salt",
)  # fmt: skip
_OF_SAMPLING = ("temperature", "top_p", "min_p")  # which say nothing of the likeliest token
# Divided by less than this, logits are no numbers any more; with this they leave but the likeliest token.
LEAST_TEMPERATURE = 1e-5
LEAST_BIAS = -1e30  # bans a token, and is a number still where all are banned
# What the engine calls otherwise than its clients do.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "eos_token_id": "stop_token_ids",
    "do_sample=True": "a temperature above 0",
}


def sampling_settings(body: SamplingBody, service: Service) -> dict[str, Any]:
    """Arguments of `ContinuousBatcher.add_request`, without those of the prompt, of lengths and of logprobs.

    Where the request is silent the model's generation_config speaks. Raises ApiError for a model that is not here, and
    for fields that do not go together.
    """
    _check_together(body)
    config = service.batcher.model.generation_config
    settings = _given(body, _AS_THEY_ARE) | _ends(body, config)
    settings["do_sample"] = do_sample = _do_sample(body, config)
    if do_sample:
        settings |= _given(body, _OF_SAMPLING) | {"top_k": _top_k(body, config)}
    if body.logit_bias:
        settings["logit_bias"] = _logit_bias(body.logit_bias)
    if (adapter := service.adapter(body.model)) is not None:
        settings["adapter"] = adapter
    return settings


def new_tokens(service: Service, asked: int | None, num_prompt: int) -> int:
    """So many as were asked for, else all that there is room for (1 where there is none, which the engine refuses)."""
    return asked if asked is not None else max(most_new_tokens(service.batcher, num_prompt), 1)


@contextmanager
def telling_fields(service: Service, fields: Mapping[str, str]) -> Iterator[None]:
    """What the engine refuses inside is told in words of the API; `fields` are an endpoint's own names for things."""
    try:
        yield
    except (InvalidConfigError, RequestTooLongError) as error:
        raise _in_words_of_api(error, fields, service.batcher.limits.get("max_model_len")) from error


def _in_words_of_api(error: Exception, fields: Mapping[str, str], longest: int | None) -> ApiError:
    prompt = fields.get("prompt", "prompt")
    names = _FIELDS | {"max_new_tokens": fields.get("max_tokens", "max_tokens")}
    text = re.sub(r"\b(do_sample=True|\w+)", lambda found: names.get(found[0], found[0]), str(error))
    if isinstance(error, RequestTooLongError):
        if longest is not None:  # the words by which clients know this error
            text = f"This model's maximum context length is {longest} tokens: {text}"
        text = text.replace("set max_model_len=", "have the server started with a longer --max-model-len")
        text = text.replace("give it more (memory= or num_blocks=)", "have it started with more --kv-cache-memory")
        return ApiError(400, text, code="context_length_exceeded", param=prompt)
    named = {*SamplingBody.model_fields, "max_tokens", "prompt", *fields}
    param = next((word for word in re.findall(r"\w+", text) if word in named), None)
    if "sequences of one request" in text:
        param = "n"
    return ApiError(400, text, code="invalid_value", param=fields.get(param or "", param))


def _check_together(body: SamplingBody) -> None:
    """Raises ApiError 400."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "stream_options says how an answer is streamed, and stream is not true; leave it out, or set stream",
            code="invalid_value", param="stream_options",
        )  # fmt: skip
    if body.stream and (body.best_of or 1) > (body.n or 1):
        raise ApiError(
            400, f"best_of={body.best_of} with n={body.n or 1}: which are best is known at the end only, so that they "
            "cannot be streamed; use stream=false, or best_of=n", code="invalid_value", param="best_of",
        )  # fmt: skip


def _given(body: SamplingBody, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _do_sample(body: SamplingBody, config: GenerationConfig | None) -> bool:
    """A temperature says it, or else what makes sense with sampling only, or else the model's generation_config."""
    if body.temperature is not None:
        return body.temperature >= LEAST_TEMPERATURE
    several = max(body.n or 1, body.best_of or 1) > 1
    return several or (body.top_p or 1) < 1 or bool(getattr(config, "do_sample", None))


def _top_k(body: SamplingBody, config: GenerationConfig | None) -> int:
    """transformers takes 50 where nobody says anything, OpenAI and vLLM take all."""
    if body.top_k is not None:
        return max(body.top_k, 0)
    return getattr(config, "top_k", None) or 0


def _ends(body: SamplingBody, config: GenerationConfig | None) -> dict[str, Any]:
    """Which tokens end an answer, where it is not the model's own only."""
    if not body.stop_token_ids:
        return {"ignore_eos": True} if body.ignore_eos else {}
    own = () if body.ignore_eos else eos_token_ids(config)
    return {"eos_token_id": list(dict.fromkeys((*own, *body.stop_token_ids)))}


def eos_token_ids(config: GenerationConfig | None) -> tuple[int, ...]:
    """The model's own end-of-sequence tokens."""
    own = getattr(config, "eos_token_id", None)
    return () if own is None else (own,) if isinstance(own, int) else tuple(own)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """By number; JSON knows texts as keys only."""
    try:
        return {int(token_id): max(bias, LEAST_BIAS) for token_id, bias in given.items()}
    except ValueError as error:
        raise ApiError(
            400, f"logit_bias names tokens by their ids, such as {{\"17\": -100}}: {error}", code="invalid_value",
            param="logit_bias",
        ) from error  # fmt: skip
