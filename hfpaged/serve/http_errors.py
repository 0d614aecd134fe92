"""Errors as OpenAI's clients know them: {"error": {message, type, param, code}} and a status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from hfpaged.errors import (
    AdapterLostError,
    BatcherClosedError,
    CallbackError,
    InvalidConfigError,
    InvalidLogitsError,
    OutOfBlocksError,
    QueueFullError,
    RankLostError,
    RequestTooLongError,
)
from hfpaged.serve.json_text import json_bytes

logger = logging.getLogger("hfpaged")

RETRY_AFTER = "1"  # seconds; a step takes less, and what is full may be free then
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}
# What the engine raises: status and code.
_KINDS: dict[type[BaseException], tuple[int, str]] = {
    RequestTooLongError: (400, "context_length_exceeded"),
    QueueFullError: (429, "queue_full"),
    BatcherClosedError: (503, "shutting_down"),
    OutOfBlocksError: (503, "out_of_blocks"),
    AdapterLostError: (503, "adapter_lost"),
    RankLostError: (503, "rank_lost"),  # the log has said which
    InvalidConfigError: (400, "invalid_value"),
    InvalidLogitsError: (422, "invalid_logits"),  # of settings such as repetition_penalty=5e-324, or of the model
}


class ApiError(Exception):
    """An answer that is no success. `param` is the field of the request that it is about."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", RETRY_AFTER)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(json_bytes(self.body), self.status, self.headers, media_type="application/json")


def invalid(message: str, param: str) -> ApiError:
    """400 for a field whose value cannot be."""
    return ApiError(400, message, code="invalid_value", param=param)


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an error. One that nobody expected is logged here, and told without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CallbackError) and isinstance(error.__cause__, ApiError):  # of one of our own processors
        return error.__cause__
    for kind, (status, code) in _KINDS.items():
        if isinstance(error, kind):
            if kind is InvalidLogitsError:  # it may be the model that is broken, which clients cannot mend
                logger.warning("a request failed: %s", error)
            return ApiError(status, str(error), code=code)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says why", code="internal_error")
