"""What a router has lately sent where: replicas tell of a prefix a while after it has come."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

# Hashes per replica: chains of 4096 tokens of 256 requests, in about 6 MB.
MOST_REMEMBERED = 1 << 16
# What was sent to a replica counts so long before it tells of it.
MEMORY_SECONDS = 20.0


class RecentPrefixes:
    """By replica. `seconds` pass until what was sent there counts only if the replica itself tells of it: the time of
    a prompt in its queue, of its forward, and of two reports.
    """

    def __init__(self, seconds: float = MEMORY_SECONDS, limit: int = MOST_REMEMBERED) -> None:
        self._seconds, self._limit = seconds, limit
        # A plain dict looks for its first key behind all those that were taken from it: 28 s for 65,536.
        self._sent: dict[str, OrderedDict[int, float]] = {}

    def note(self, replica: str, hashes: Iterable[int], now: float) -> None:
        """A prompt with these hashes goes there."""
        sent = self._sent.setdefault(replica, OrderedDict())
        for each in hashes:
            sent[each] = now
            sent.move_to_end(each)
        while len(sent) > self._limit:
            sent.popitem(last=False)

    def matched(self, replica: str, depths: Mapping[int, int], told: frozenset[int], now: float) -> int:
        """How many blocks of a prompt the replica has, by the last one that it tells of or that was sent there; the
        prompt's hashes have their depths, from 1 on.
        """
        sent = self._sent.get(replica, OrderedDict())
        lately = (each for each in sent.keys() & depths.keys() if now - sent[each] < self._seconds)
        return max((depths[each] for each in itertools.chain(told.intersection(depths), lately)), default=0)

    def placed(self, replica: str, now: float) -> int:
        """How much was lately sent there, each prefix once."""
        sent = self._sent.get(replica, OrderedDict())
        while sent and now - next(iter(sent.values())) >= self._seconds:
            sent.popitem(last=False)
        return len(sent)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all others: they have gone."""
        self._sent = {name: sent for name, sent in self._sent.items() if name in replicas}
