"""Token ids for a trace that has none: equal chunks give equal ones, different chunks give different ones.

What a trace does not say is taken to be like nothing else: the end of a prompt behind its last full chunk, and an
answer whose hashes are not known. So in a trace of others a later turn of a conversation hits no more than the prompt
of the turn before.
"""

from __future__ import annotations

import struct
from array import array

from hfpaged.planner.trace import TraceRequest

# Ids of chunks lie below, those of what is like nothing else from here on.
_OWN = 1 << 62
_SAMPLES = 1024  # of one request, at most


def token_ids(request: TraceRequest, number: int, chunk: int) -> array[int]:
    """All tokens of a request, its prompt and its (first) answer. `number` tells it from all others."""
    hashes = request.hashes
    known = len(hashes) * chunk
    if request.answer_hashes:
        hashes, known = hashes + request.answer_hashes, known + len(request.answer_hashes) * chunk
    else:
        known = min(known, request.prompt_tokens)
    tokens = array("q", b"".join([struct.pack("q", value % _OWN) * chunk for value in hashes]))
    del tokens[known:]
    tokens.extend(own_tokens(number, 0, request.prompt_tokens + max(request.output_tokens, 1) - len(tokens)))
    return tokens


def own_tokens(number: int, sample: int, count: int) -> array[int]:
    """Like nothing else: of sample `sample` of request `number`."""
    return array("q", [_OWN + number * _SAMPLES + sample]) * max(count, 0)
