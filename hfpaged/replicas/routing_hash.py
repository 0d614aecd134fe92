"""The hashes by which requests find replicas: chained over blocks as those of the prefix index are, and begun by a root
that says for whom and for which adapter.

A replica's own digests begin with a fingerprint of its weights, which nobody knows who has no model. These need none.
They are keyed, so that who sees them cannot try prompts out, and short: whatever they match by chance costs a detour
and nothing else, as a replica compares the tokens themselves.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable
from typing import Any

from hfpaged.block_hash import ExtraKey, block_hash, root_hash, salt_key

SIZE = 8  # bytes of one hash
# What besides the tokens tells prefixes apart that are computed by one model.
KINDS = ("salt", "adapter")


class RoutingHash:
    """`secret` is the same on all replicas and all who send requests to them. Raises ValueError for an empty one."""

    def __init__(self, secret: bytes) -> None:
        if not secret:
            raise ValueError("routing hashes need a secret; give the one that salts are derived from")
        self._key = hashlib.sha256(b"hfpaged routing" + secret).digest()

    def root(self, keys: Iterable[ExtraKey]) -> bytes:
        """What stands before the first block, by the keys of a root of the prefix index or by `keys_for`."""
        return root_hash([key for key in keys if key.kind in KINDS], self._hash)

    def block(self, parent: bytes, tokens: array[int]) -> bytes:
        """The hash of a full block behind the block (or root) with hash `parent`."""
        return block_hash(parent, tokens, self._hash)

    def chain(self, keys: Iterable[ExtraKey], tokens: Iterable[int], block_size: int) -> bytes:
        """Those of the full blocks of a prompt that a replica may know, one behind the other: its last token is always
        computed.
        """
        items = array("q", tokens)
        found, parent = bytearray(), self.root(keys)
        for start in range(0, (len(items) - 1) // block_size * block_size, block_size):
            parent = self.block(parent, items[start : start + block_size])
            found += parent
        return bytes(found)

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=SIZE, key=self._key).digest()


def keys_for(salt: str | None, adapter: str | None) -> list[ExtraKey]:
    """Those of a request with this salt, on this adapter."""
    keys = [] if salt is None else [salt_key(salt)]
    return keys if adapter is None else [*keys, ExtraKey("adapter", adapter)]


def as_numbers(hashes: bytes) -> array[int]:
    """Hashes behind each other as unsigned 64-bit numbers."""
    found = array("Q", hashes)
    if sys.byteorder == "big":  # the machines of a cluster may differ
        found.byteswap()
    return found


def hashes_in(given: Any) -> bytes | None:
    """What came from elsewhere, if it is whole hashes behind each other; None for none of them."""
    return given if isinstance(given, bytes) and given and len(given) % SIZE == 0 else None
