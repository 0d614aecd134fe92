"""A socket to listen on, before there is a server for it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hfpaged.errors import InvalidConfigError


@contextmanager
def listening_on(host: str, port: int) -> Iterator[socket.socket]:
    """A socket there, closed at the end. Raises InvalidConfigError where none can be had."""
    try:
        listening = bound(host, port)
    except (OSError, UnicodeError) as error:  # names that can be none
        raise InvalidConfigError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; use another --host, or "
            "another --port (0 takes a free one)"
        ) from error
    with listening:
        yield listening


def bound(host: str, port: int) -> socket.socket:
    """A socket that nobody can connect to yet: whether the address is free shall be known before a model is loaded.

    Raises OSError.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        _reuse(found)
        with socket.socket(family, kind, protocol) as trial:  # who listens there is seen by listening only
            _reuse(trial)
            trial.bind(address)
            trial.listen()
            address = trial.getsockname()
        found.bind(address)
    except BaseException:
        found.close()
        raise
    return found


def _reuse(listening: socket.socket) -> None:
    """Connections of the server before may not be gone yet. On Windows this would mean to share a port."""
    if sys.platform != "win32":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
