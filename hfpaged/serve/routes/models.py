"""Which models can be named in requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.responding import service_of
from hfpaged.serve.service import Service

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The model under each of its names, and the adapters."""
    service = service_of(request)
    return {"object": "list", "data": [_model(service, name) for name in _names(service)]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    if model not in _names(service):
        raise ApiError(404, f"there is no model {model!r} here", code="model_not_found", param="model")
    return _model(service, model)


def _names(service: Service) -> list[str]:
    return [*service.model_names, *service.options.adapters]


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "hfpaged",
        "root": service.model_names[0], "parent": service.model_names[0] if name in service.options.adapters else None,
        "max_model_len": service.batcher.limits.get("max_model_len"),
    }  # fmt: skip
