"""The chained hash of full blocks: SHA-256 over (parent hash, token ids of the block), begun by a root that says for
whom and for what model the keys were computed. Hashes narrow a search down; `PrefixIndex` compares the ids as well.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

HashFunction = Callable[[bytes], bytes]


class ExtraKey(NamedTuple):
    """What besides the token ids decides about keys and values. Each is tagged by its kind, so that a salt "x" and an
    adapter "x" differ.
    """

    kind: str  # "model", "adapter", "salt", "input" (a content hash), "argument"
    value: str


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def salt_key(salt: str) -> ExtraKey:
    """Of a salt only its hash is kept, so that it stands in no file of saved prefixes."""
    return ExtraKey("salt", sha256(salt.encode()).hex())


def root_hash(keys: Iterable[ExtraKey], hash_function: HashFunction = sha256) -> bytes:
    """The hash that stands before the first block. The order of `keys` does not matter."""
    return hash_function(b"".join(_framed(part) for key in sorted(keys) for part in key))


def block_hash(parent: bytes, tokens: array[int], hash_function: HashFunction = sha256) -> bytes:
    """The hash of a full block behind the block (or root) with hash `parent`; `tokens` as 64-bit numbers."""
    return hash_function(parent + struct.pack("<q", len(tokens)) + _little_endian(tokens))


def _framed(text: str) -> bytes:
    """With its length in front, so that no two lists of texts give the same bytes."""
    raw = text.encode()
    return struct.pack("<q", len(raw)) + raw


def _little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "little":
        return tokens.tobytes()
    swapped = tokens[:]
    swapped.byteswap()
    return swapped.tobytes()
