"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from hfpaged.engine.call import Call, Submission
from hfpaged.engine.outputs import RequestOutput
from hfpaged.serve.event_stream import DONE, event
from hfpaged.serve.responding import respond_stream, respond_whole

router = APIRouter(tags=["completions"])


class CompletionRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: int | None = 16
    temperature: float | None = None
    stream: bool = False


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Text or token ids that go on."""
    prepare = partial(_submissions, body)
    if body.stream:
        return await respond_stream(request, prepare, _chunks)
    return await respond_whole(request, prepare, _whole)


def _submissions(body: CompletionRequest) -> Iterable[Submission]:
    yield Submission(body.prompt, {"max_tokens": body.max_tokens, "temperature": body.temperature})


def _whole(outputs: list[RequestOutput]) -> dict[str, Any]:
    return {
        "object": "text_completion",
        "created": int(time.time()),
        "choices": [{"index": 0, "text": outputs[0].text}],
    }


async def _chunks(call: Call) -> AsyncGenerator[bytes]:
    async for arrival in call.arrivals():
        for new in arrival.events:
            yield event({"object": "text_completion", "choices": [{"index": new.index, "text": new.text}]})
    yield DONE
