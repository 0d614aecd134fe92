"""The two ZMQ sockets of a publisher, in a context of their own: closing it gives their ports back."""

from __future__ import annotations

import errno
import logging
import socket as plain
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_events.config import KVEventsConfig
from hfpaged.kv_events.endpoint import Endpoint

logger = logging.getLogger("hfpaged")

LINGER_MS = 500  # for what a subscriber has not taken yet when all is closed
MOST_BYTES = 1024  # of what comes in, which is a number, or a topic


class Sockets:
    """`events` is a PUB, `replays` a ROUTER or None. Raises InvalidConfigError for an address that cannot be had."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._files: list[Path] = []
        self.events: Any = self._context.socket(zmq.PUB)
        self.replays: Any = None
        try:
            self.events.setsockopt(zmq.SNDHWM, config.hwm)
            self.endpoint = self._open(self.events, config.endpoint)
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self.replays = self._context.socket(zmq.ROUTER)
                # All that is kept fits into what waits for one client; of one who does not read, no more. Twice as
                # much, since he says what he has read only after each half.
                self.replays.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                self.replay_endpoint = self._open(self.replays, config.replay_endpoint)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Once no thread uses them. Waits `LINGER_MS` for slow subscribers at most."""
        for file in self._files:  # as long as they are bound nobody else has made one of that name
            file.unlink(missing_ok=True)
        for socket in (self.events, self.replays):
            if socket is not None:
                socket.close(linger=LINGER_MS)
        self._context.term()

    def _open(self, socket: Any, text: str) -> str:
        """Bind or connect; the address that came of it."""
        endpoint = Endpoint.parse(text)
        socket.setsockopt(zmq.IPV6, ":" in endpoint.host and endpoint.scheme == "tcp")
        try:
            if not endpoint.is_here:
                socket.connect(str(endpoint))
                return str(endpoint)
            if endpoint.scheme == "ipc" and _is_served(endpoint.host):
                raise zmq.ZMQError(errno.EADDRINUSE)
            socket.bind(str(endpoint))
        except zmq.ZMQError as error:
            raise InvalidConfigError(
                f"cannot publish KV events at {text}: {zmq.strerror(error.errno or 0)}; name another endpoint, such as "
                f"{'tcp://127.0.0.1:*, which takes a free port' if endpoint.scheme == 'tcp' else 'ipc:///tmp/kv-events'}"
            ) from error
        found: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if endpoint.scheme == "ipc":
            self._files.append(Path(found.removeprefix("ipc://")))
        return found


def _is_served(path: str) -> bool:
    """Whether somebody listens at a file: ZMQ would put its own in the place of that."""
    with plain.socket(plain.AF_UNIX) as trial, suppress(OSError):  # nobody does, or a bind will say what is wrong
        trial.connect(path)
        return True
    return False


def warn_if_seen(texts: tuple[str, ...]) -> None:
    """Events hold what people wrote."""
    for text in texts:
        if not Endpoint.parse(text).is_private:
            logger.warning(
                "KV events go to %s, which other machines reach: they hold the token ids of prompts and answers in "
                "clear, and whoever connects reads them; see that only your router does",
                text,
            )
