"""Paths that are about replicas rather than about a model: what one process tells of itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import Scope

from hfpaged.replicas.answered import REPLICA, Answered
from hfpaged.replicas.calls import ReplicaCalls
from hfpaged.replicas.failover import no_replica
from hfpaged.replicas.gathered import gathered_metrics
from hfpaged.serve.gate import path_of
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.json_text import json_bytes

TEXT = (b"accept", b"text/plain; version=0.0.4")


class ForAll:
    """/metrics        those of all replicas, with a label that says whose
    /health, /ready    well while one replica is
    /v1/kv/reset       in all replicas
    /v1/kv/*           of one replica: ?replica=NAME, or the first by name
    /v1/replicas       which there are, and what they do
    """

    own_paths = ("/v1/replicas",)

    def __init__(self, calls: ReplicaCalls) -> None:
        self._calls = calls
        self._answers: dict[str, Callable[[Scope, bytes], Awaitable[Response]]] = {
            "/metrics": self._metrics,
            "/health": self._best,
            "/ready": self._best,
            "/v1/kv/reset": self._worst,
            "/v1/kv/stats": self._of_one,
            "/v1/kv/explain": self._of_one,
            "/v1/replicas": self._rows,
        }

    def is_for_all(self, scope: Scope) -> bool:
        """Whether `answer` is to answer it."""
        return path_of(scope) in self._answers

    async def answer(self, scope: Scope, body: bytes) -> Response:
        """Raises ApiError."""
        return await self._answers[path_of(scope)](scope, body)

    async def _metrics(self, scope: Scope, body: bytes) -> Response:
        headers = [pair for pair in scope["headers"] if pair[0] != b"accept"]
        answers = await self._calls.ask_all({**scope, "headers": [*headers, TEXT]}, body)
        if scope["method"] != "GET":
            return _response(answers[0])
        texts = {answer.replica: _body(answer).decode() for answer in answers}
        accept = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), None)
        text, content_type = gathered_metrics(texts, accept)
        return Response(text, media_type=content_type)

    async def _best(self, scope: Scope, body: bytes) -> Response:
        return _response(min(await self._calls.ask_all(scope, body, enough=_is_well), key=_status))

    async def _worst(self, scope: Scope, body: bytes) -> Response:
        return _response(max(await self._calls.ask_all(scope, body, strict=True), key=_status))

    async def _of_one(self, scope: Scope, body: bytes) -> Response:
        wanted = parse_qs(scope["query_string"].decode("latin-1")).get("replica", [None])[0]
        answers = await self._calls.ask_all(scope, body, wanted)
        if answers:
            found = _response(answers[0])
            found.raw_headers.append((REPLICA, answers[0].replica.encode()))
            return found
        known = ", ".join(row["replica"] for row in await self._calls.rows())
        raise ApiError(404, f"there is no replica {wanted!r} here; use one of: {known}", code="replica_not_found",
                       param="replica")  # fmt: skip

    async def _rows(self, scope: Scope, body: bytes) -> Response:
        if scope["method"] != "GET":
            raise ApiError(405, "/v1/replicas is to be read; use GET", code="method_not_allowed")
        rows = [{"object": "replica", **row} for row in await self._calls.rows()]
        return Response(json_bytes({"object": "list", "data": rows}), media_type="application/json")


def _is_well(answer: Answered) -> bool:
    return _status(answer) == 200


def _status(answer: Answered) -> int:
    status: int = answer.messages[0]["status"]
    return status


def _body(answer: Answered) -> bytes:
    return b"".join(message.get("body", b"") for message in answer.messages[1:])


def _response(answer: Answered) -> Response:
    """As the replica gave it."""
    if not answer.messages:
        raise no_replica()
    found = Response(_body(answer), _status(answer))
    found.raw_headers = list(answer.messages[0]["headers"])
    return found
