"""What a router has lately sent where: replicas tell of a prefix a while after it has come."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

# Hashes per replica: chains of 4096 tokens of 256 requests, in about 6 MB.
MOST_REMEMBERED = 1 << 16


class RecentPrefixes:
    """By replica. `seconds` pass until what was sent there counts only if the replica itself tells of it: the time of
    a prompt in its queue, of its forward, and of two reports.
    """

    def __init__(self, seconds: float = 20.0, limit: int = MOST_REMEMBERED) -> None:
        self._seconds, self._limit = seconds, limit
        self._sent: dict[str, dict[int, float]] = {}

    def note(self, replica: str, hashes: Iterable[int], now: float) -> None:
        """A prompt with these hashes goes there."""
        sent = self._sent.setdefault(replica, {})
        for each in hashes:
            sent.pop(each, None)
            sent[each] = now
        while len(sent) > self._limit or (sent and now - next(iter(sent.values())) > self._seconds):
            del sent[next(iter(sent))]

    def matched(self, replica: str, hashes: Collection[int], told: Collection[int], now: float) -> int:
        """How many blocks of a prompt the replica has, by the last one that it tells of or that was sent there."""
        sent = self._sent.get(replica, {})
        left = len(hashes)
        for each in reversed(list(hashes)):
            if each in told or now - sent.get(each, -math.inf) < self._seconds:
                return left
            left -= 1
        return 0

    def placed(self, replica: str) -> int:
        """How much was lately sent there, each prefix once."""
        return len(self._sent.get(replica, {}))

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all others: they have gone."""
        self._sent = {name: sent for name, sent in self._sent.items() if name in replicas}
