"""For Prometheus."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from hfpaged.serve.metrics import exposition
from hfpaged.serve.responding import service_of

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """All metrics of this process, as Prometheus reads them. They take some milliseconds, so a thread makes them."""
    registry = service_of(request).registry
    text, content_type = await asyncio.to_thread(exposition, registry, request.headers.get("accept"))
    return Response(text, media_type=content_type)
