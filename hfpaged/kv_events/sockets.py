"""The two ZMQ sockets of a publisher, in a context of their own: closing it gives their ports back."""

from __future__ import annotations

import logging
from typing import Any

import zmq

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_events.config import KVEventsConfig
from hfpaged.kv_events.endpoint import Endpoint

logger = logging.getLogger("hfpaged")

LINGER_MS = 500  # for what a subscriber has not taken yet when all is closed


class Sockets:
    """`events` is a PUB, `replays` a ROUTER or None. Raises InvalidConfigError for an address that cannot be had."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._context = zmq.Context()
        self.events: Any = self._context.socket(zmq.PUB)
        self.replays: Any = None
        try:
            self.events.setsockopt(zmq.SNDHWM, config.hwm)
            self.endpoint = _open(self.events, config.endpoint)
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self.replays = self._context.socket(zmq.ROUTER)
                # All that is kept fits into what waits for one client; of one who does not read, no more. Twice as
                # much, since he says what he has read only after each half.
                self.replays.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                self.replay_endpoint = _open(self.replays, config.replay_endpoint)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Once no thread uses them. Waits `LINGER_MS` for slow subscribers at most."""
        for socket in (self.events, self.replays):
            if socket is not None:
                socket.close(linger=LINGER_MS)
        self._context.term()


def _open(socket: Any, text: str) -> str:
    """Bind or connect; the address that came of it."""
    endpoint = Endpoint.parse(text)
    socket.setsockopt(zmq.IPV6, ":" in endpoint.host and endpoint.scheme == "tcp")
    try:
        if not endpoint.is_here:
            socket.connect(str(endpoint))
            return str(endpoint)
        socket.bind(str(endpoint))
        found: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return found
    except zmq.ZMQError as error:
        raise InvalidConfigError(
            f"cannot publish KV events at {text}: {zmq.strerror(error.errno or 0)}; name another endpoint, such as "
            f"{'tcp://127.0.0.1:*, which takes a free port' if endpoint.scheme == 'tcp' else 'ipc:///tmp/kv-events'}"
        ) from error


def warn_if_seen(texts: tuple[str, ...]) -> None:
    """Events hold what people wrote."""
    for text in texts:
        if not Endpoint.parse(text).is_private:
            logger.warning(
                "KV events go to %s, which other machines reach: they hold the token ids of prompts and answers in "
                "clear, and whoever connects reads them; see that only your router does",
                text,
            )
