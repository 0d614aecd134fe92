"""One request and its answer, as the gate sees them pass: by which name, how it ended, and the line that is logged."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger("hfpaged.access")

REQUEST_ID = b"x-request-id"
# What a client may call its request: nothing that would be more than a word in a log or a header.
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
MOST_PATH = 200
# Who watches a server asks again and again, as the live page does each second, and tells nobody anything.
QUIET = frozenset(("/health", "/ready", "/metrics", "/v1/kv/stats", "/v1/replicas"))


class Exchange:
    """`status` is 0 until an answer has begun, and 499 once the client has gone before its end."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.request_id = _request_id(scope)
        self.status = 0
        self.has_begun = self.is_over = False
        self._began = time.perf_counter()
        scope["hfpaged.request_id"] = self.request_id.decode()

    async def receive(self) -> Message:
        """What the client sends; nothing more once it has gone."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.is_over:
            self.status = 499
        return message

    async def send(self, message: Message) -> None:
        """Passes on, with the name of the request in the headers."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.status = self.status or message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID, self.request_id)]}
        await self._send(message)
        self.is_over = message["type"] == "http.response.body" and not message.get("more_body", False)

    def log(self, path: str) -> None:
        """Its line: never what a client wrote but for its path, and that without the query."""
        level = logging.DEBUG if path in QUIET and self.status in (200, 503) else logging.INFO
        if not logger.isEnabledFor(level):
            return
        caller = self.scope.get("hfpaged.caller")
        seen = {
            "method": self.scope["method"], "path": _printable(self.scope), "status": self.status,
            "ms": round((time.perf_counter() - self._began) * 1e3, 1), "request_id": self.request_id.decode(),
            "tenant": (caller.tenant if caller else "") or "-",
        }  # fmt: skip
        logger.log(level, "%(method)s %(path)s %(status)s %(ms)s ms %(request_id)s %(tenant)s", seen,
                   extra={"fields": seen})  # fmt: skip


def _request_id(scope: Scope) -> bytes:
    """The client's own word for it where it is sane, else one that nobody else has."""
    given: bytes = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
    return given if _SANE.fullmatch(given) else uuid.uuid4().hex.encode()


def _printable(scope: Scope) -> str:
    """As it was sent, with all that is no plain character in its place as %XX, and not without end."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    text = "".join(chr(byte) if 32 < byte < 127 else f"%{byte:02X}" for byte in raw.partition(b"?")[0])
    return text if len(text) <= MOST_PATH else text[:MOST_PATH] + "..."
