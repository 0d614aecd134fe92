"""Token ids for a trace that has none: equal chunks give equal ones, different chunks give different ones.

What a trace does not say is taken to be like nothing else: the end of a prompt behind its last full chunk, and an
answer whose hashes are not known. So in a trace of others a later turn of a conversation hits no more than the prompt
of the turn before.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping

from hfpaged.planner.trace import Runs, Trace, TraceRequest

# Ids of chunks lie below, those of what is like nothing else from here on.
_OWN = 1 << 62
_SAMPLES = 1024  # of one request, at most


def token_ids(trace: Trace, request: TraceRequest, number: int) -> array[int]:
    """All tokens of a request, its prompt and its (first) answer. `number` tells it from all others."""
    hashes, chunk = request.hashes, trace.chunk
    known = min(len(hashes) * chunk, request.prompt_tokens)
    if request.answer_hashes:
        hashes += request.answer_hashes
        known = len(hashes) * chunk
    if trace.runs.keys().isdisjoint(hashes):
        tokens = array("q", b"".join([struct.pack("q", value % _OWN) * chunk for value in hashes]))
    else:
        tokens = _tokens(run for value in hashes for run in trace.runs.get(value, ((value, chunk),)))
    del tokens[known:]
    total = request.prompt_tokens + max(request.output_tokens, 1)
    if request.like is not None and request.like[0] * chunk == len(tokens):
        tokens.extend(_tokens(head_of(trace.runs, *request.like[1:])))
        del tokens[total:]
    tokens.extend(own_tokens(number, 0, total - len(tokens)))
    return tokens


def own_tokens(number: int, sample: int, count: int) -> array[int]:
    """Like nothing else: of sample `sample` of request `number`."""
    return array("q", [_OWN + number * _SAMPLES + sample]) * max(count, 0)


def head_of(runs: Mapping[int, Runs], value: int, count: int) -> Runs:
    """Of what the first `count` tokens of the chunk with hash `value` are made."""
    head: list[tuple[int, int]] = []
    for other, length in runs.get(value, ((value, count),)):
        if count <= 0:
            break
        head.append((other, min(length, count)))
        count -= length
    return tuple(head)


def _tokens(runs: Iterable[tuple[int, int]]) -> array[int]:
    return array("q", b"".join([struct.pack("q", value % _OWN) * count for value, count in runs]))
