"""/load_model: `transformers chat` lets its server load a model first, and here it is loaded."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from hfpaged.serve.event_stream import event
from hfpaged.serve.responding import service_of
from hfpaged.serve.schemas.sampling import Body

router = APIRouter(include_in_schema=False)


class LoadBody(Body):
    model: str = Field(description="A name that /v1/models tells.")


@router.post("/load_model")
async def load_model(body: LoadBody, request: Request) -> Response:
    """One event: the model is ready, or there is none of that name, in words that the client shows. It asks without a
    key, so that it is not told which models there are.
    """
    service = service_of(request)
    told: dict[str, Any] = {"status": "ready", "model": body.model, "cached": True}
    if body.model not in (*service.model_names, *service.options.adapters):
        told = {
            "status": "error", "model": body.model,
            "message": f"there is no model {body.model!r} here; /v1/models tells which there are",
        }  # fmt: skip
    return Response(event(told), media_type="text/event-stream")
