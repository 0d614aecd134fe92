"""/v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.serve.openapi import events_of
from hfpaged.serve.responding import respond_stream, respond_whole, service_of
from hfpaged.serve.responses_answer import ResponsesAnswer
from hfpaged.serve.sampling import telling_fields
from hfpaged.serve.schemas.responses import ResponseAnswer, ResponseEvent, ResponsesBody

router = APIRouter(tags=["responses"])


@router.post("/v1/responses", response_model=None, responses=events_of(ResponseAnswer, ResponseEvent))
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """The answer to a conversation of items: whole, or with `stream` event by event. Nothing is kept of it."""
    service = service_of(request)
    answer = ResponsesAnswer(body, service)
    with telling_fields(service, answer.fields):
        if body.stream:
            return await respond_stream(request, answer.submissions, answer.events)
        return await respond_whole(request, answer.submissions, answer.whole)
