"""Miss-ratio curves against a least-recently-used cache that is simulated size by size."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfpaged.planner.miss_ratio import FenwickTree, miss_ratio_curve
from hfpaged.planner.trace import Trace, TraceRequest

CHUNK = 4


def trace_of(paths, outputs=()):
    """Requests whose prompts are paths down a tree: equal leading steps give equal hashes."""
    requests = []
    for index, path in enumerate(paths):
        hashes = tuple(hash(tuple(path[: depth + 1])) for depth in range(len(path)))
        output = outputs[index] if index < len(outputs) else 0
        requests.append(TraceRequest(float(index), len(path) * CHUNK + 1, output, hashes))
    return Trace(requests, CHUNK)


def pieces(hashes, piece):
    return [(value, place) for value in hashes for place in range(CHUNK // piece)]


def simulated(trace, capacity, piece=CHUNK):
    """Tokens found by a cache of `capacity` pieces, request by request, piece by piece."""
    cache, found = OrderedDict(), 0
    for number, request in enumerate(trace.requests):
        for value in pieces(request.hashes, piece):
            if value not in cache:
                break
            found += piece
        total = -(-(request.prompt_tokens + request.output_tokens) // piece)
        hashes = pieces([*request.hashes, *request.answer_hashes], piece)
        chunks = hashes + [(number, extra) for extra in range(total - len(hashes))]
        for value in reversed(chunks):  # the first is the most recent
            cache[value] = None
            cache.move_to_end(value)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=25),
    st.lists(st.integers(0, 3 * CHUNK), max_size=25),
)
def test_the_curve_is_what_a_simulated_cache_finds_at_every_size(paths, outputs):
    trace = trace_of(paths, outputs)
    for block_size in (None, 2, 3, 8):
        curve = miss_ratio_curve(trace, block_size=block_size)
        assert curve.chunk == {None: CHUNK, 2: 2, 3: 1, 8: CHUNK}[block_size]
        for capacity in range(0, 60, 1 if curve.chunk == CHUNK else 7):
            assert curve.hit_tokens(capacity) == simulated(trace, capacity, curve.chunk)


def test_the_end_of_a_prompt_takes_its_blocks_and_no_whole_chunk():
    requests = [TraceRequest(float(i), 520, 1, (i % 2,)) for i in range(4)]  # one new token behind a chunk of 512
    by_blocks = miss_ratio_curve(Trace(requests, 512), block_size=16)
    assert by_blocks.enough * by_blocks.chunk == 2 * 512 + 16
    by_chunks = miss_ratio_curve(Trace(requests, 512))
    assert by_chunks.enough * by_chunks.chunk == 3 * 512


def test_of_a_chunk_that_is_a_part_of_a_prompt_no_more_is_found_than_the_prompt_has():
    twice = [TraceRequest(float(i), 550, 0, (1, 2)) for i in range(2)]  # as in Mooncake's traces
    assert miss_ratio_curve(Trace(twice, 512), block_size=16).hit_tokens(1000) == 549


def test_answers_that_come_again_as_prompts_are_found():
    first = TraceRequest(0.0, 8, 8, (1, 2), (3, 4))
    second = TraceRequest(1.0, 17, 4, (1, 2, 3, 4))
    curve = miss_ratio_curve(Trace([first, second], CHUNK))
    assert [curve.hit_tokens(size) for size in range(6)] == [0, 4, 8, 12, 16, 16]


def test_one_token_of_a_prompt_is_always_computed():
    twice = [TraceRequest(float(i), 8, 0, (1, 2)) for i in range(2)]
    assert miss_ratio_curve(Trace(twice, CHUNK)).hit_tokens(10) == 7


def test_samples_of_one_request_take_room_each():
    asked = [TraceRequest(0.0, 4, 0, (1,)), TraceRequest(1.0, 4, 8, (9,), n=3), TraceRequest(2.0, 5, 0, (1,))]
    curve = miss_ratio_curve(Trace(asked, CHUNK))
    assert curve.enough == 1 + 1 + 3 * 2
    assert curve.hit_tokens(7) == 0
    assert curve.hit_tokens(8) == 4


def test_ratios_are_of_prompt_tokens_and_grow_to_the_most():
    curve = miss_ratio_curve(trace_of([[1, 1], [2, 2], [1, 1]]))
    assert curve.hit_ratio(0) == 0
    assert curve.most == curve.hit_ratio(curve.enough) == curve.hit_ratio(10**9) == pytest.approx(8 / 27)


def test_a_trace_without_hashes_has_no_hits():
    curve = miss_ratio_curve(Trace([TraceRequest(0.0, 100, 1)] * 3, CHUNK))
    assert (curve.enough, curve.most) == (0, 0.0)


def test_it_tells_how_far_it_is():
    seen = []
    miss_ratio_curve(trace_of([[1]] * 3), seen.append)
    assert seen == [0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-5, 5)), max_size=40))
def test_fenwick_sums_are_sums(changes):
    tree, plain = FenwickTree(10), [0] * 10
    for index, amount in changes:
        tree.add(index, amount)
        plain[index] += amount
    assert [tree.after(index) for index in range(10)] == [sum(plain[index + 1 :]) for index in range(10)]
