"""Whether the server lives, and whether it is ready for more."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.responding import service_of

router = APIRouter(tags=["health"])


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """200 while steps are made, and the one under way is within its time."""
    engine = service_of(request).engine
    if engine is None or not engine.is_healthy:
        raise ApiError(503, "the engine makes no steps", code="engine_dead")
    return Response()


@router.get("/ready", response_class=Response)
async def ready(request: Request) -> Response:
    """200 while more requests are welcome; 503 while kernels are compiled, the queue is full, or it stops."""
    why_not = service_of(request).why_not_ready()
    if why_not is not None:
        raise why_not
    return Response()
