"""/v1/kv/*: what is in the pool, why prompts hit or miss, and how to forget them."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from hfpaged.serve.json_text import json_bytes
from hfpaged.serve.kv.explaining import explanation
from hfpaged.serve.kv.live import Live
from hfpaged.serve.kv.resetting import forget_prefixes
from hfpaged.serve.responding import caller_of, service_of
from hfpaged.serve.schemas.kv import ExplainRequest, Explanation, ResetDone, Stats

router = APIRouter(tags=["kv"])


@router.get("/v1/kv/stats", response_model=None, responses={200: {"model": Stats}})
async def kv_stats(
    request: Request,
    since: Annotated[float, Query(ge=0, le=1e12, description="Of the history only the seconds from here on.")] = 0.0,
) -> Response:
    """Pool, requests, rates and latencies now, the last minutes second by second, and what the doctor advises.
    Numbers are those of /metrics. With API keys, of others' requests only state and memory are told.
    """
    live: Live = request.app.state.live
    caller = caller_of(request)
    return await _from_thread(lambda: live.look(caller, since))


@router.post("/v1/kv/explain", response_model=None, responses={200: {"model": Explanation}})
async def kv_explain(body: ExplainRequest, request: Request) -> Response:
    """How much of a prompt is known now, and why no more: nothing is computed or changed."""
    service, caller = service_of(request), caller_of(request)
    return await _from_thread(lambda: explanation(service, caller, body))


@router.post(
    "/v1/kv/reset",
    response_model=None,
    responses={200: {"model": ResetDone}, 409: {"description": "Blocks are in use."}},
)
async def kv_reset(request: Request) -> Response:
    """Forget all prefixes, everybody's; 409 while blocks are in use, and nothing is forgotten then."""
    pool = service_of(request).batcher.pool
    return await _from_thread(lambda: {"object": "kv.reset", "dropped_blocks": forget_prefixes(pool)})


async def _from_thread(make: Any) -> Response:
    """Pools have a lock, and much to count: the event loop does not wait for either."""

    def body() -> bytes:
        return json_bytes(make())

    return Response(await anyio.to_thread.run_sync(body), media_type="application/json")
