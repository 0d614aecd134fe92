"""What stands for tokens in a trace: a keyed hash of all tokens up to the end of each chunk."""

from __future__ import annotations

import hashlib
from array import array


def chunk_hashes(secret: bytes, root: bytes, tokens: array[int], chunk: int) -> list[str]:
    """64 bits in hexadecimal for each full chunk of `tokens`, chained: equal where all tokens before are equal, too,
    under the same `root`. Without the `secret` (16 to 64 bytes) nobody can find out what they stand for.

    BLAKE2b with a key (RFC 7693) as a pseudorandom function.
    """
    hashes = []
    before = root
    for end in range(chunk, len(tokens) + 1, chunk):
        before = hashlib.blake2b(before + tokens[end - chunk : end].tobytes(), digest_size=16, key=secret).digest()
        hashes.append(before[:8].hex())
    return hashes
