"""HTTP/1.1 by hand, for clients that no library would be: they lie about lengths, hang up, and read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any

PIECE = 64 * 1024
SLOW_BUFFER = 4096  # bytes that wait at a client who reads slowly


@dataclass(frozen=True)
class Reply:
    """`status` is None where the client left, or the server hung up, before there was one."""

    status: int | None
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream of server-sent events, those that are JSON."""
        lines = [line[len(b"data: ") :] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


@dataclass(frozen=True)
class Manner:
    """How a client behaves.

    cut      bytes of the request after which nothing more is sent, and the client hangs up after `leave` seconds
    leave    seconds after which the client hangs up, whatever has come; None: it waits for the end
    leave_at bytes of the answer after which it does
    pause    seconds between reads of few bytes each
    """

    cut: int | None = None
    leave: float | None = None
    leave_at: int | None = None
    pause: float = 0.0


POLITE = Manner()


def request_bytes(
    method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, chunked: bool = False
) -> bytes:
    """The whole request; the connection is closed after it. A header may replace one of those that belong there."""
    fields = {"Host": "test", "Connection": "close"}
    if body is not None and not chunked:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + (body or b"")


async def exchange(port: int, request: bytes, manner: Manner = POLITE, patience: float = 120.0) -> Reply:
    """Send a request in this manner, and read what comes. Raises TimeoutError when it takes longer than `patience`."""
    reader, writer = await _connect(port, is_slow=manner.pause > 0)
    received = bytearray()
    try:
        writer.write(request if manner.cut is None else request[: manner.cut])
        await writer.drain()
        reading = _read(reader, received, manner)
        limit = manner.leave if manner.cut is not None or manner.leave is not None else patience
        try:
            await asyncio.wait_for(reading, limit)
        except asyncio.TimeoutError:
            if limit is patience:
                raise TimeoutError(f"no end of the answer after {patience} s") from None
    except OSError:  # hung up on, which is an answer too
        pass
    finally:
        writer.transport.abort()
    return _parse(bytes(received))


async def _connect(port: int, is_slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket()
    if is_slow:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=connection, limit=SLOW_BUFFER if is_slow else PIECE)


async def _read(reader: asyncio.StreamReader, received: bytearray, manner: Manner) -> None:
    while data := await reader.read(SLOW_BUFFER if manner.pause else PIECE):
        received += data
        if manner.leave_at is not None and len(received) >= manner.leave_at:
            return
        if manner.pause:
            await asyncio.sleep(manner.pause)


def _parse(received: bytes) -> Reply:
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return Reply(None)
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    return Reply(int(head.split(b" ", 2)[1]), _joined(body) if is_chunked else body)


def _joined(body: bytes) -> bytes:
    """What the chunks hold that have come whole."""
    parts, start = [], 0
    while (end := body.find(b"\r\n", start)) >= 0:
        size = int(body[start:end].split(b";")[0] or b"0", 16)
        parts.append(body[end + 2 : end + 2 + size])
        start = end + 2 + size + 2
    return b"".join(parts)
