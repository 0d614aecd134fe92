"""/openapi.json: what FastAPI finds in the routes, with the errors and the keys, which are the same for all of them."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from hfpaged.serve.schemas.answers import ChatCompletionChunk, ErrorBody
from hfpaged.serve.schemas.responses import ResponseEvent

_REF = "#/components/schemas/{model}"
_OF_OPEN = {
    400: "The request is wrong: `param` is the field, `message` says what it should be.",
    503: "The server stops or is not ready, or the request took too long. Retry-After says when to try again.",
}
_OF_KEYS = {401: "The API key is missing or not known."}
_OF_PATHS = {404: "There is no such model."}
_OF_BODIES = {
    404: "There is no such model.",
    413: "The body is larger than this server takes.",
    422: "The request is right, and this model cannot do it: it has no chat template, say.",
    429: "The queue is full. Retry-After says when to try again.",
}


def events_of(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For a route: JSON, or with `stream` events whose data are JSON of `chunk`."""
    # No type: to some a stream is one text, to others (Schemathesis) each event is an object.
    schema = {"description": "Server-sent events.", "x-data": chunk.__name__}
    return {200: {"model": whole, "content": {"text/event-stream": {"schema": schema}}}}


def describe(app: FastAPI, open_paths: Collection[str], has_keys: bool) -> None:
    """Let `app` tell of its errors, and which paths want a key. The document is made when it is asked for first."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, open_paths, has_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, open_paths: Collection[str], has_keys: bool) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which is never sent
        schemas.pop(name, None)
    for model in (ErrorBody, ChatCompletionChunk, ResponseEvent):  # which FastAPI meets in no route
        schema = model.model_json_schema(ref_template=_REF)
        schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
    if has_keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, methods in found["paths"].items():
        for operation in methods.values():
            is_open = path in open_paths
            _complete(operation, path, is_open)
            if has_keys:
                operation["security"] = [] if is_open else [{"bearer": []}]
    return found


def _complete(operation: dict[str, Any], path: str, is_open: bool) -> None:
    """Put the errors into an operation, besides those that it names itself."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    errors = (
        _OF_OPEN
        | ({} if is_open else _OF_KEYS)
        | (_OF_BODIES if "requestBody" in operation else _OF_PATHS if "{" in path else {})
    )
    for status, told in errors.items():
        responses.setdefault(str(status), _error(told))
    for status, response in responses.items():  # those that a route names without a body
        if status.startswith(("4", "5")) and "content" not in response:
            responses[status] = _error(response.get("description") or HTTPStatus(int(status)).phrase)


def _error(told: str) -> dict[str, Any]:
    reference = {"$ref": _REF.format(model="ErrorBody")}
    return {"description": told, "content": {"application/json": {"schema": reference}}}
