"""Answers those who have missed batches, as vLLM's publisher does: [number] comes, and [number, payload] goes for each
batch from that one on that is kept, then [-1, nothing].

One thing is better than there: who asks for batches that are kept no more, a router that starts late say, gets all that
is there now as one batch in their place, and can follow from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq

from hfpaged.kv_events.replay_buffer import Batch, ReplayBuffer

logger = logging.getLogger("hfpaged")

POLL_MS = 100
END = (-1).to_bytes(8, "big", signed=True)


class ReplayServer:
    """A thread around a ROUTER socket. `everything` writes a batch of all that is there now."""

    def __init__(self, socket: Any, buffer: ReplayBuffer, everything: Callable[[], bytes]) -> None:
        self._socket, self._buffer, self._everything = socket, buffer, everything
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hfpaged-kv-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The socket is nobody's afterwards."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                if self._socket.poll(POLL_MS):
                    self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
            except Exception:
                logger.exception("a request for missed KV events was not answered")

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for missed KV events of %d frames is none: 8 bytes were expected", len(frames))
            return
        client, delimiter, number = frames
        for batch in self._missed(int.from_bytes(number, "big")):
            self._send(client, delimiter, batch.number.to_bytes(8, "big"), batch.payload)
        self._send(client, delimiter, END, b"")

    def _missed(self, number: int) -> list[Batch]:
        kept, first = self._buffer.since(number)
        return kept if number >= first else [Batch(first - 1, self._everything()), *kept]

    def _send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK)
