"""/v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.serve.completion_answer import CompletionAnswer
from hfpaged.serve.openapi import events_of
from hfpaged.serve.responding import respond_stream, respond_whole, service_of
from hfpaged.serve.sampling import telling_fields
from hfpaged.serve.schemas.answers import Completion
from hfpaged.serve.schemas.completion import CompletionBody

router = APIRouter(tags=["completions"])


@router.post("/v1/completions", response_model=None, responses=events_of(Completion, Completion))
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Texts or token ids that go on: whole, or with `stream` piece by piece."""
    service = service_of(request)
    answer = CompletionAnswer(body, service)
    with telling_fields(service, {"prompt_logprobs": "logprobs"}):
        if body.stream:
            return await respond_stream(request, answer.submissions, answer.chunks)
        return await respond_whole(request, answer.submissions, answer.whole)
