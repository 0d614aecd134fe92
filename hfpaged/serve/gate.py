"""What every request passes before its body is parsed: who asks, how much he may send, and what is told of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hfpaged.serve.body import read_body, replayed
from hfpaged.serve.callers import KeyRing
from hfpaged.serve.exchange import Exchange
from hfpaged.serve.http_errors import ApiError, api_error
from hfpaged.serve.options import ServeOptions
from hfpaged.serve.tracing import in_trace_of

# Who watches a server has no key of it: these tell no text and take nothing. `transformers chat` sends its key later.
OPEN = frozenset(("/", "/health", "/ready", "/metrics", "/openapi.json", "/docs", "/load_model"))


class Guard(Protocol):
    """What a gate goes by; a Service is one."""

    options: ServeOptions
    keys: KeyRing

    @property
    def max_body_bytes(self) -> int:
        """Of one request."""


class Guarded:
    """The paths behind the keys: those of the routes, but for the open ones. What is no path of this server is refused
    with 404 to everybody alike: which paths there are is no secret, and a client with a wrong address shall not look
    for a wrong key.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        found = [route for route in routes if isinstance(route, Route) and route.path not in OPEN]
        self._exact = frozenset(route.path for route in found)
        self._patterns: list[re.Pattern[str]] = [route.path_regex for route in found]

    def __contains__(self, path: object) -> bool:
        """As the router itself looks for a route, which takes "/v1/models\\n" for "/v1/models", say."""
        return path in self._exact or any(pattern.match(str(path)) for pattern in self._patterns)


class Gate:
    """ASGI middleware: puts "hfpaged.caller" and "hfpaged.request_id" into the scope and the body behind it, or answers
    with an error itself. It logs a line for each request.
    """

    def __init__(self, app: ASGIApp, service: Guard, guarded: Guarded) -> None:
        self._app, self._service, self._guarded = app, service, guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, path = Exchange(scope, receive, send), path_of(scope)
        try:
            await self._pass(scope, exchange, path)
        except Exception as error:
            if not exchange.has_begun and exchange.status != 499:
                await api_error(error).response()(scope, receive, exchange.send)
            elif not isinstance(error, ApiError):
                api_error(error)  # it is logged
        finally:
            exchange.log(path)

    async def _pass(self, scope: Scope, exchange: Exchange, path: str) -> None:
        """Raises ApiError, and what the application raises."""
        self._check(scope, path)
        service = self._service
        body = await read_body(scope, exchange.receive, service.max_body_bytes, service.options.send_timeout)
        if body is not None:
            with in_trace_of(scope, path):
                await self._app(_as_get(scope), replayed(body, exchange.receive), exchange.send)

    def _check(self, scope: Scope, path: str) -> None:
        """Headers alone. Raises ApiError."""
        size, authorization, site = 0, b"", b""
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            if name == b"authorization":
                authorization = value
            elif name == b"sec-fetch-site":
                site = value
        if size > self._service.options.max_header_bytes:
            raise too_many_headers(self._service.options.max_header_bytes)
        if path in self._guarded:
            keys = self._service.keys
            if site == b"cross-site" and not keys.is_needed:
                raise foreign_page()
            scope["hfpaged.caller"] = keys.caller(authorization.decode("latin-1"))


def _as_get(scope: Scope) -> Scope:
    """HEAD is answered as GET, by every path that has it: the server leaves the body out. Load tools and load balancers
    ask so whether /metrics or /health is there.
    """
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def path_of(scope: Scope) -> str:
    """Within this application, which may be mounted in another one."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(root + "/") else path


def foreign_page() -> ApiError:
    """A browser says that a page of another site asks (Fetch Metadata, W3C): its user may know nothing of it."""
    return ApiError(
        403, "a page of another site asks, and this server lets in everybody who reaches it: start it with --api-key, "
        "or ask from the page's own server", code="cross_site_request",
    )  # fmt: skip


def too_many_headers(limit: int) -> ApiError:
    return ApiError(
        431, f"the headers are longer than {limit} bytes, which is this server's limit", code="headers_too_large",
        headers={"Connection": "close"},
    )  # fmt: skip
