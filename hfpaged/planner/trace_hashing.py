"""What stands for tokens in a trace: a keyed hash of all tokens up to the end of each chunk, and how far a new chunk is
like one that was there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from hfpaged.common_runs import common_length

# Chunks that are remembered to be compared, some 300 bytes each, and of those behind one chunk so many of the newest.
REMEMBERED, COMPARED = 1 << 17, 32


class Like(NamedTuple):
    """Chunk number `place` of a sequence is new, and its first `common` tokens are those of the chunk with `hash` in
    the same place behind the same tokens.
    """

    place: int
    hash: str
    common: int


class Hashed(NamedTuple):
    """The hashes of the full chunks, 64 bits in hexadecimal each."""

    hashes: list[str]
    like: Like | None


@dataclass
class ChunkHasher:
    """Chained hashes under a `secret` of 16 to 64 bytes: equal where all tokens before are equal, too. Without the
    secret nobody can find out what they stand for. BLAKE2b with a key (RFC 7693) as a pseudorandom function.
    """

    secret: bytes
    chunk: int
    remembered: int = REMEMBERED
    _behind: OrderedDict[bytes, dict[bytes, array[int]]] = field(default_factory=OrderedDict)
    _count: int = 0

    def hashes(self, root: bytes, tokens: array[int]) -> Hashed:
        """Of the tokens of one sequence; only those under the same `root` can be alike."""
        hashes: list[str] = []
        like: Like | None = None
        before = hashlib.blake2b(root, digest_size=16, key=self.secret).digest()
        is_known = True
        for place, start in enumerate(range(0, len(tokens), self.chunk)):
            items = tokens[start : start + self.chunk]
            is_full = len(items) == self.chunk
            digest = hashlib.blake2b(before + items.tobytes(), digest_size=16, key=self.secret).digest()
            siblings = self._siblings(before, is_full)
            if is_known and digest not in siblings:
                is_known, like = False, self._most_like(place, items, siblings)
            if is_full:
                hashes.append(_short(digest))
                self._remember(siblings, digest, items)
                before = digest
        return Hashed(hashes, like)

    def _siblings(self, before: bytes, is_kept: bool) -> dict[bytes, array[int]]:
        """The chunks behind `before`, the oldest first."""
        found = self._behind.get(before)
        if found is None:
            return self._behind.setdefault(before, {}) if is_kept else {}
        self._behind.move_to_end(before)
        return found

    def _remember(self, siblings: dict[bytes, array[int]], digest: bytes, items: array[int]) -> None:
        self._count += digest not in siblings
        siblings.pop(digest, None)
        siblings[digest] = items
        if len(siblings) > COMPARED:
            del siblings[next(iter(siblings))]
            self._count -= 1
        while self._count > self.remembered:
            _, gone = self._behind.popitem(last=False)
            self._count -= len(gone)

    @staticmethod
    def _most_like(place: int, items: array[int], siblings: dict[bytes, array[int]]) -> Like | None:
        """The newest of those with the most tokens in common."""
        best = max(((common_length(each, items), digest) for digest, each in siblings.items() if each[0] == items[0]),
                   key=lambda pair: pair[0], default=(0, b""))  # fmt: skip
        return Like(place, _short(best[1]), best[0]) if best[0] else None


def _short(digest: bytes) -> str:
    return digest[:8].hex()
