"""How much may be done beside the requests, so that these do not notice."""

from __future__ import annotations

# While there are requests spare work takes at most this part of the engine's time: less than steps differ by.
BUSY_SHARE = 0.02
# A piece of it, which a request that comes may have to wait for: less than a step of most models.
PIECE_SECONDS = 0.02
FEWEST, MOST = 8, 512  # tokens of a piece


class SpareTime:
    """Counts in seconds. While nobody waits there is always time for one more piece."""

    def __init__(self) -> None:
        self._credit = 0.0
        self._per_token: float | None = None  # as the last piece took

    def earn(self, seconds: float) -> None:
        """Steps took so long. What is earned is kept for one piece, not for a burst of them."""
        self._credit = min(self._credit + BUSY_SHARE * seconds, max(self._cost, PIECE_SECONDS))

    @property
    def is_earned(self) -> bool:
        """Whether there is time for a piece beside the requests."""
        return self._credit >= self._cost

    @property
    def tokens(self) -> int:
        """Of the next piece: as many as take about `PIECE_SECONDS`."""
        if self._per_token is None:
            return FEWEST
        return max(FEWEST, min(MOST, int(PIECE_SECONDS / self._per_token)))

    def spend(self, tokens: int, seconds: float, *, beside: bool) -> None:
        """A piece took so long, `beside` the requests or while there were none. One that took longer than was earned
        is paid for by waiting longer.
        """
        if tokens:
            self._per_token = max(seconds, 1e-9) / tokens
        if beside:
            self._credit -= seconds

    @property
    def _cost(self) -> float:
        return PIECE_SECONDS if self._per_token is None else self.tokens * self._per_token
