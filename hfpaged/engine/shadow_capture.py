"""What a live sequence was sampled from: logits as the model gave them, before any processor, at some of its positions.

They stay as they are, in the dtype that the model computes: what is made of them later is exact.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from hfpaged.engine.request import SequenceState

# Enough to see of each request how it goes: 64 rows of 128,256 bfloat16 numbers are 16 MB.
MOST_ROWS = 64


class Room:
    """The bytes that all captures together may take."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    def take(self, count: int) -> bool:
        """Whether there was room for so many bytes; they are taken then."""
        if self.taken + count > self.most:
            return False
        self.taken += count
        return True

    def give_back(self, count: int) -> None:
        self.taken -= count


class Capture:
    """Of one sequence up to `MOST_ROWS` rows, each position as likely to be among them as any other (reservoir
    sampling: algorithm R of Vitter, 1985). `why_lost` says in a word why there are none any more.

    rows    logits [vocab] on the CPU by position: those behind the first `position` tokens
    """

    def __init__(self, seq: SequenceState, room: Room, random: Random) -> None:
        self.seq = seq
        self.rows: dict[int, Tensor] = {}
        self.why_lost = ""
        self._room, self._random = room, random
        self._num_seen, self._last, self._bytes = 0, -1, 0

    def see(self, position: int, logits: Tensor) -> None:
        """The next token is chosen by these logits [vocab]. It never raises: live traffic goes on whatever happens."""
        if position <= self._last or self.why_lost:  # Ctrl-C came between, and the step was made again
            return
        try:
            self._see(position, logits)
        except Exception:
            self.lose("error")
        self._last = position

    def lose(self, reason: str) -> None:
        """What was captured goes."""
        self.why_lost = self.why_lost or reason
        self.clear()

    def clear(self) -> None:
        """The bytes go back."""
        self._room.give_back(self._bytes)
        self._bytes, self.rows = 0, {}

    def _see(self, position: int, logits: Tensor) -> None:
        self._num_seen += 1
        if len(self.rows) < MOST_ROWS:
            if not self._room.take(logits.nbytes):
                self.lose("memory")
                return
            self._bytes += logits.nbytes
        else:
            place = self._random.randrange(self._num_seen)
            if place >= MOST_ROWS:
                return
            del self.rows[list(self.rows)[place]]
        self.rows[position] = logits.detach().to("cpu", copy=True)
