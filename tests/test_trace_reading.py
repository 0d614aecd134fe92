"""A trace is read as far as it can be: what is no request is counted and shown, and never ends the reading."""

import gzip
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfpaged.planner import trace_reading
from hfpaged.planner.trace_reading import TraceError, read, read_lines

HEADER = {"format": "hfpaged-trace", "version": 1, "chunk": 4, "started": 1000.0}


def lines(*records):
    return iter([record if isinstance(record, bytes) else json.dumps(record).encode() for record in records])


def request(**fields):
    return {"arrival": 0.0, "prompt_tokens": 8, "output_tokens": 4, **fields}


def test_a_recording_is_read_with_its_hashes_and_steps():
    step = {"kind": "step", "prefill": 8, "decodes": 3, "context": 90, "seconds": 0.25}
    asked = request(hashes=["0a", "0b"], answer_hashes=["0c"], tenant=2, n=3, hits=4, finish="stop", ttft=0.5)
    trace = read_lines(lines(HEADER, asked, step))
    (found,) = trace.requests
    assert found.hashes == (10, 11)
    assert found.answer_hashes == (12,)
    assert (found.tenant, found.n, found.hits, found.finish, found.ttft) == (2, 3, 4, "stop", 0.5)
    assert trace.steps == [(8, 3, 90, 0.25)]
    assert trace.chunk == 4
    assert trace.has_hashes
    assert (trace.prompt_tokens, trace.output_tokens) == (8, 12)


def test_requests_are_put_in_the_order_in_which_they_came_and_time_begins_with_the_first():
    trace = read_lines(lines(request(arrival=9.5), request(arrival=7.0), request(arrival=8.0)))
    assert [found.arrival for found in trace.requests] == [0.0, 1.0, 2.5]
    assert trace.seconds == 2.5


def test_a_recording_that_was_appended_later_comes_later():
    trace = read_lines(lines(HEADER, request(arrival=5.0), {**HEADER, "started": 1100.0}, request(arrival=1.0)))
    assert [found.arrival for found in trace.requests] == [0.0, 96.0]


def test_the_mooncake_format_is_milliseconds_and_chunks_of_512_with_the_last_part_of_one():
    line = {"timestamp": 2000, "input_length": 6755, "output_length": 500, "hash_ids": list(range(14))}
    trace = read_lines(lines({**line, "timestamp": 500}, line))
    assert trace.chunk == 512
    assert trace.requests[1].arrival == 1.5
    assert trace.requests[0].hashes == tuple(range(14))
    assert trace.requests[0].prompt_tokens == 6755


def test_lines_of_vllm_like_names_are_read():
    (found,) = read_lines(lines({"arrival_time": 3, "prompt_len": 12, "output_len": 0})).requests
    assert (found.prompt_tokens, found.output_tokens, found.arrival) == (12, 0, 0.0)


BAD = {
    "no JSON": b"{nonsense",
    "no JSON object": b"[1, 2]",
    "brackets": b"[" * 100_000,
    "Extra data": b'{"arrival": 1} {"arrival": 2}',
    "utf-8": b'{"arrival": "\xff"}',
    '"prompt_tokens" is True': request(prompt_tokens=True),
    '"prompt_tokens" is 0': request(prompt_tokens=0),
    '"output_tokens" is 1.5': request(output_tokens=1.5),
    '"prompt_tokens" is 10000000000000000000': request(prompt_tokens=10**19),
    "none of": {"arrival": 1, "output_tokens": 3},
    "when the request came": {"prompt_tokens": 1, "output_tokens": 3},
    '"arrival" is nan': b'{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}',
    '"arrival" is 1000': request(arrival=10**400),
    '"n" is 0': request(n=0),
    '"ttft" is -1': request(ttft=-1),
    '"hash_ids" is': request(hash_ids=["zz"]),
    "no header before it": request(hashes=["0a"]),
    "3 hashes of 512 tokens": request(hash_ids=[1, 2, 3]),
    "of format 'other'": {"format": "other", "version": 1},
    "version 9": {**HEADER, "version": 9},
    '"chunk" is None': {**HEADER, "chunk": None},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_line_is_counted_with_its_number_and_reason(reason):
    trace = read_lines(lines(request(), b"", BAD[reason]))
    assert len(trace.requests) == 1
    assert trace.skipped.count == 1
    ((line, why),) = trace.skipped.first
    assert line == 3
    assert reason in why


def test_lines_behind_an_unreadable_header_are_not_taken_for_those_of_another_recording():
    trace = read_lines(lines(request(), {**HEADER, "version": 2}, request(), HEADER, request()))
    assert len(trace.requests) == 2
    assert trace.skipped.count == 2
    changed = read_lines(lines(HEADER, request(), {**HEADER, "chunk": 8}, request()))
    assert "for 4 tokens before and for 8" in changed.skipped.first[0][1]
    assert len(changed.requests) == 1


def test_only_the_first_reasons_are_kept():
    trace = read_lines(lines(request(), *[b"?"] * 1000))
    assert trace.skipped.count == 1000
    assert len(trace.skipped.first) == 5


def test_a_file_without_requests_says_what_was_expected():
    with pytest.raises(TraceError, match=r"is empty; expected is one JSON object a line with"):
        read_lines(lines())
    with pytest.raises(TraceError, match=r"2 tried: line 1: it is no JSON: .*; line 2: .*expected is one JSON object"):
        read_lines(lines(b"hello", {"arrival": 1}))
    with pytest.raises(TraceError, match="the trace nowhere cannot be read: No such file"):
        read("nowhere")


def test_gzip_is_read_whatever_its_name_and_as_far_as_it_goes(tmp_path):
    whole = gzip.compress(b"\n".join(json.dumps(request(arrival=number)).encode() for number in range(2000)))
    (tmp_path / "trace.jsonl").write_bytes(whole)
    assert len(read(tmp_path / "trace.jsonl").requests) == 2000
    (tmp_path / "torn.gz").write_bytes(whole[: len(whole) // 2])
    torn = read(tmp_path / "torn.gz")
    assert 0 < len(torn.requests) < 2000
    assert "breaks off" in torn.skipped.first[-1][1]


def test_a_dash_is_stdin(monkeypatch):
    monkeypatch.setattr(
        trace_reading.sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(json.dumps(request()).encode())))
    )
    assert len(read("-").requests) == 1
    packed = gzip.compress(json.dumps(request()).encode())
    monkeypatch.setattr(trace_reading.sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(packed))))
    assert len(read("-").requests) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["arrival", "timestamp", "prompt_tokens", "output_tokens", "hashes", "hash_ids", "answer_hashes", "tenant", "n",
         "priority", "adapter", "hits", "finish", "ttft", "kind", "format", "version", "chunk", "started"]  # fmt: skip
RECORDS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JSON | st.sampled_from(["step", "hfpaged-trace", 1])))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=30) | RECORDS.map(lambda record: json.dumps(record).encode()), max_size=6))
def test_whatever_the_lines_are_all_are_read_or_counted(drawn):
    drawn = [line for text in drawn for line in text.split(b"\n") if line.strip()]
    trace = read_lines(lines(request(), *drawn))
    counted = len(trace.requests) + len(trace.steps) + trace.skipped.count
    assert 1 + sum(b'"format"' not in line for line in drawn) <= counted <= 1 + len(drawn)
    for found in trace.requests:
        assert found.arrival >= 0
        assert found.prompt_tokens >= 1
        assert found.output_tokens >= 0
        assert len(found.hashes) <= -(-found.prompt_tokens // trace.chunk)
