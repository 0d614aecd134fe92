"""Answers those who have missed batches, as vLLM's publisher does: [number] comes, and [topic, number, payload] goes
for each batch from that one on that is kept, then [nothing, -1, nothing].

One thing is better than there: who asks for batches that are kept no more, a router that starts late say, gets all that
is there as one batch in the place of all, and can follow from then on.
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
    """A thread around a ROUTER socket. `everything` is a batch that says all that the last one left behind; `topic` is
    None where answers are as vLLM 0.25 and earlier sent them, without one.
    """

    def __init__(self, socket: Any, buffer: ReplayBuffer, everything: Callable[[], Batch], topic: bytes | None) -> None:
        self._socket, self._buffer, self._everything = socket, buffer, everything
        self._topic, self._no_topic = ([], []) if topic is None else ([topic], [b""])
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
            self._send(client, delimiter, *self._topic, batch.number.to_bytes(8, "big"), batch.payload)
        self._send(client, delimiter, *self._no_topic, END, b"")

    def _missed(self, number: int) -> list[Batch]:
        kept, first = self._buffer.since(number)
        return kept if number >= first else [self._everything()]

    def _send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK)
