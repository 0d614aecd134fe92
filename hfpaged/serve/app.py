"""The ASGI application: routes, what stands before them, and how errors are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.errors import HfpagedError
from hfpaged.serve.gate import OPEN, Gate, Guarded
from hfpaged.serve.http_errors import ApiError, api_error
from hfpaged.serve.invalid_body import invalid_body
from hfpaged.serve.kv.live import Live
from hfpaged.serve.openapi import describe
from hfpaged.serve.options import ServeOptions
from hfpaged.serve.routes import (
    chat,
    completions,
    health,
    kv,
    load_model,
    metrics,
    models,
    page,
    responses,
    tokenize,
)
from hfpaged.serve.service import Service

# In the order of /openapi.json.
ROUTERS = (
    models.router, chat.router, completions.router, responses.router, tokenize.router, kv.router, health.router,
    metrics.router, page.router, load_model.router,
)  # fmt: skip

# Late versions of FastAPI make three spans of each request, and of each look at /ready, between the caller's and ours.
# Older ones keep the argument and have no use for it.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def build_app(batcher: ContinuousBatcher, options: ServeOptions | None = None) -> FastAPI:
    """An application that serves `batcher`: its steps are made by a thread from its start to its end.

        app = hfpaged.serve.build_app(batcher)
        uvicorn.run(app)

    `app.state.service` is what its handlers use. Starlette starts no mounted applications: where this one is mounted in
    another, that one's lifespan holds `async with app.router.lifespan_context(app):`.
    """
    service = Service(batcher, options or ServeOptions())
    live = Live(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with live.watching():
            async with service.running():
                yield

    app = FastAPI(
        title="hfpaged", version=version("hfpaged"), lifespan=lifespan, docs_url=None, redoc_url=None,
        telemetry=NO_TELEMETRY,
    )  # fmt: skip
    app.state.service, app.state.live = service, live
    for router in ROUTERS:
        app.include_router(router)
    describe(app, OPEN, bool(service.options.api_keys))
    app.add_middleware(Gate, service=service, guarded=Guarded(route for router in ROUTERS for route in router.routes))
    app.add_exception_handler(ApiError, _tell)
    app.add_exception_handler(HfpagedError, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell)
    return app


def paths() -> list[str]:
    """All that an application answers."""
    return [route.path for router in ROUTERS for route in router.routes if isinstance(route, Route)]


async def _tell(request: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _tell_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid_body(error).response()


async def _tell_http(request: Request, error: Exception) -> Response:
    """No such path, or not this method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return ApiError(error.status_code, str(error.detail), code="invalid_request", headers=headers).response()
