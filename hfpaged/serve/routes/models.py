"""Which models can be named in requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.json_text import json_bytes
from hfpaged.serve.responding import service_of
from hfpaged.serve.schemas.answers import Model, ModelList
from hfpaged.serve.service import Service

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})
async def list_models(request: Request) -> Response:
    """The model under each of its names, and the adapters."""
    service = service_of(request)
    return _json({"object": "list", "data": [_model(service, name) for name in _names(service)]})


@router.get("/v1/models/{model:path}", response_model=None, responses={200: {"model": Model}})
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    service = service_of(request)
    if model not in _names(service):
        raise ApiError(404, f"there is no model {model!r} here", code="model_not_found", param="model")
    return _json(_model(service, model))


def _names(service: Service) -> list[str]:
    return [*service.model_names, *service.options.adapters]


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "hfpaged",
        "root": service.model_names[0], "parent": service.model_names[0] if name in service.options.adapters else None,
        "max_model_len": service.batcher.limits.get("max_model_len"),
    }  # fmt: skip


def _json(answer: dict[str, Any]) -> Response:
    return Response(json_bytes(answer), media_type="application/json")
