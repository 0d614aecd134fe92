"""HTTP by hand, for clients that no library would be: who hang up in the middle, send too much, or do not read."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def head(path: str, size: int | None, method: str = "POST", **headers: str) -> bytes:
    """Of a request with a body of `size` bytes; None for one in chunks, or none."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if size is not None:
        lines.append(f"Content-Length: {size}")
    return "\r\n".join([*lines, "", ""]).encode()


def request(path: str, body: Mapping[str, object], **headers: str) -> bytes:
    text = json.dumps(body).encode()
    return head(path, len(text), **headers) + text


@contextmanager
def connected(port: int, *, receive_buffer: int | None = None, seconds: float = 30.0) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(seconds)
        sock.connect(("127.0.0.1", port))
        yield sock


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """All that comes until `mark` has, or the end."""
    found = b""
    while mark not in found and (part := sock.recv(65536)):
        found += part
    return found


def read_all(sock: socket.socket) -> bytes:
    """Until the other side closes, in whatever way."""
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
