"""/v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.serve.chat_answer import ChatAnswer
from hfpaged.serve.openapi import events_of
from hfpaged.serve.responding import respond_stream, respond_whole, service_of
from hfpaged.serve.sampling import telling_fields
from hfpaged.serve.schemas.answers import ChatCompletion, ChatCompletionChunk
from hfpaged.serve.schemas.chat import ChatBody

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", response_model=None, responses=events_of(ChatCompletion, ChatCompletionChunk))
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """The answer to a conversation, by the model's chat template: whole, or with `stream` piece by piece."""
    service = service_of(request)
    answer = ChatAnswer(body, service)
    with telling_fields(service, answer.fields):
        if body.stream:
            return await respond_stream(request, answer.submissions, answer.chunks)
        return await respond_whole(request, answer.submissions, answer.whole)
