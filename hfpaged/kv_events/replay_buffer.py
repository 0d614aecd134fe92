"""The last batches that were published, for those who have missed some."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

MOST_BYTES = 64 << 20  # of payloads; the last one stays, however large


class Batch(NamedTuple):
    number: int  # counts on from 0; 8 bytes, big-endian, in messages
    payload: bytes


class ReplayBuffer:
    """At most `most_batches`, and as many as `most_bytes` hold; older ones are forgotten."""

    def __init__(self, most_batches: int, most_bytes: int = MOST_BYTES) -> None:
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self._batches: deque[Batch] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, batch: Batch) -> None:
        """The next one."""
        with self._lock:
            self._batches.append(batch)
            self._num_bytes += len(batch.payload)
            while len(self._batches) > 1 and self._is_too_full():
                self._num_bytes -= len(self._batches.popleft().payload)

    def since(self, number: int) -> tuple[list[Batch], int]:
        """(the batches that are kept from `number` on, the number of the first that is kept at all)."""
        with self._lock:
            first = self._batches[0].number if self._batches else 0
            return [batch for batch in self._batches if batch.number >= number], first

    def _is_too_full(self) -> bool:
        return len(self._batches) > self._most_batches or self._num_bytes > self._most_bytes
