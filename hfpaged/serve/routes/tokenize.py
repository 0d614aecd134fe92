"""Texts and conversations as the model's tokens, and back."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.serve.body_prompt import prompt_of_messages
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.json_text import json_bytes
from hfpaged.serve.logprob_text import TokenTexts
from hfpaged.serve.responding import service_of
from hfpaged.serve.schemas.answers import Detokenized, Tokenized
from hfpaged.serve.schemas.tokenize import DetokenizeBody, TokenizeBody
from hfpaged.serve.service import Service
from hfpaged.serve.tool_choice import tool_choice_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", response_model=None, responses={200: {"model": Tokenized}})
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """The tokens of a text, or of the prompt that a conversation makes."""
    return _json(await asyncio.to_thread(_tokenized, body, service_of(request)))


@router.post("/detokenize", response_model=None, responses={200: {"model": Detokenized}})
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of tokens, special ones included."""
    return _json(await asyncio.to_thread(_detokenized, body, service_of(request)))


def _tokenized(body: TokenizeBody, service: Service) -> dict[str, Any]:
    """Raises ApiError."""
    service.adapter(body.model)
    token_ids = _token_ids(body, service)
    texts = TokenTexts(service.tokenizer)
    strings = [texts.text(token) for token in token_ids] if body.return_token_strs else None
    longest = service.batcher.limits.get("max_model_len")
    return {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids, "token_strs": strings}


def _token_ids(body: TokenizeBody, service: Service) -> list[int]:
    if body.messages is not None and body.prompt is None:
        return prompt_of_messages(body.messages, body, service.tokenizer).token_ids
    if body.prompt is None or body.messages is not None:
        raise ApiError(400, "prompt is a text and messages a conversation; send one of the two", code="invalid_value",
                       param="prompt")  # fmt: skip
    tool_choice_of(body.tools, body.tool_choice)  # which have no place in a text, and are read all the same
    adds = body.add_special_tokens is not False
    token_ids: list[int] = service.tokenizer(body.prompt, add_special_tokens=adds)["input_ids"]
    return token_ids


def _detokenized(body: DetokenizeBody, service: Service) -> dict[str, Any]:
    """Raises ApiError."""
    service.adapter(body.model)
    tokenizer = service.tokenizer
    wrong = next((token for token in body.tokens if token >= len(tokenizer)), None)
    if wrong is not None:
        raise ApiError(400, f"tokens has {wrong}, and the tokenizer knows 0 to {len(tokenizer) - 1}; use its own ids",
                       code="invalid_value", param="tokens")  # fmt: skip
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _json(answer: dict[str, Any]) -> Response:
    return Response(json_bytes(answer), media_type="application/json")
