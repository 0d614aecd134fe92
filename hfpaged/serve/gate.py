"""What every request passes before it is read: who asks, and how much he may send."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.service import Service

# Who watches a server has no key of it: these tell no text and take nothing.
OPEN = ("/", "/health", "/ready", "/metrics", "/openapi.json", "/docs")


class Gate:
    """ASGI middleware: puts "hfpaged.caller" into the scope, or answers with an error itself."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError."""
        if scope["path"] not in OPEN:
            headers = dict(scope["headers"])
            scope["hfpaged.caller"] = self._service.keys.caller(headers.get(b"authorization", b"").decode("latin-1"))
