"""A server's trace: what it says and does not say, and that its replay finds the prefixes that the server found."""

import errno
import json
import logging
import os
import stat
import threading
from array import array

import pytest
from replays import run
from served import served, wait_until
from serving import PATH, body, slow_steps, tiny_batcher

from hfpaged import cli
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.cost_fitting import fit_cost
from hfpaged.planner.replay_grid import recorded_variant
from hfpaged.planner.trace_hashing import ChunkHasher, Like
from hfpaged.planner.trace_reading import read
from hfpaged.serve import ServeOptions, recording
from hfpaged.serve.recording import check_record

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = list(range(200, 231))  # 31 tokens, whose end lies within a block
PROMPTS = [[*HEAD, 40, 41, 42], HEAD + [50] * 20, [*HEAD, 40, 41, 77], list(range(100, 140)), HEAD[:9] + [60] * 9]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def requests_of(path):
    return [line for line in lines_of(path) if "arrival" in line]


def ask(server, prompt, **rest):
    answer = server.client.post(PATH, json=body(prompt, **{"max_tokens": 12} | rest))
    assert answer.status_code == 200, answer.text
    server.wait_until_idle()


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_replay_of_a_trace_finds_the_prefixes_that_the_server_found(tmp_path, block_size):
    path = tmp_path / "trace.jsonl"
    with tiny_batcher(block_size=block_size) as batcher:
        with served(batcher, ServeOptions(record=str(path))) as server:
            for prompt in PROMPTS + PROMPTS[:2]:
                ask(server, prompt)
            turn = server.client.post(PATH, json=body(PROMPTS[0], max_tokens=30)).json()
            server.wait_until_idle()
            answered = batcher.tokenizer(turn["choices"][0]["text"])["input_ids"]
            ask(server, PROMPTS[0] + answered + [7, 8])
            ask(server, [*HEAD, 90], n=2, temperature=1.0, seed=1)
        counts = batcher.pool.prefixes.index.counts
    trace = read(path)
    assert not trace.skipped.count
    variant = recorded_variant(trace).with_rate(0.01)  # one after the other, whatever this machine and COST take
    outcome, _ = run(trace, variant)
    assert (outcome.hit_tokens, outcome.queried_tokens) == (counts.hits, counts.queries)
    assert counts.hits > 150
    assert counts.hits % block_size  # some lie within a block
    assert outcome.hit_tokens == sum(request.hits for request in trace.requests)


def test_a_trace_says_lengths_times_and_sharing_and_no_text_token_or_name(tmp_path):
    path = tmp_path / "trace.jsonl"
    keys = {"alice": "key-a", "bob": "key-b"}
    with tiny_batcher() as batcher, served(batcher, ServeOptions(record=str(path), api_keys=keys)) as server:
        for key in ("key-a", "key-a", "key-b"):
            server.client.headers["Authorization"] = f"Bearer {key}"
            ask(server, "the quick brown fox jumps over the dog", priority=3)
    header, *_ = lines_of(path)
    first, second, other = requests_of(path)
    assert first["hashes"] == second["hashes"]
    assert not set(first["hashes"]) & set(other["hashes"])  # tenants share no prefix
    assert (first["tenant"], second["tenant"], other["tenant"]) == (1, 1, 2)
    assert first["hits"] == 0 < second["hits"]
    assert (first["output_tokens"], first["finish"], first["priority"]) == (12, "length", 3)
    assert 0 < first["ttft"] < first["duration"]
    assert 0 <= first["arrival"] < second["arrival"] < other["arrival"]
    assert header["num_blocks"] == 600
    assert len(first["hashes"]) == first["prompt_tokens"] // header["chunk"]
    text = path.read_text()
    ids = batcher.tokenizer("the quick brown fox jumps over the dog")["input_ids"]
    for forbidden in ("quick", "fox", "alice", "bob", "key-a", json.dumps(ids)[1:-1], json.dumps(ids[:3])[1:-1]):
        assert forbidden not in text
    known = {"arrival", "prompt_tokens", "output_tokens", "hashes", "answer_hashes", "like", "tenant", "priority",
             "hits", "finish", "ttft", "duration", "n", "adapter"}  # fmt: skip
    assert {name for line in requests_of(path) for name in line} <= known
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_recordings_of_the_same_prompt_have_no_hash_in_common(tmp_path):
    path = tmp_path / "trace.jsonl"
    with tiny_batcher() as batcher:
        for _ in range(2):
            with served(batcher, ServeOptions(record=str(path))) as server:
                ask(server, HEAD)
    first, second = requests_of(path)
    assert len(first["hashes"]) == 7
    assert not set(first["hashes"]) & set(second["hashes"])
    assert len(read(path).requests) == 2


def test_steps_are_recorded_and_tell_what_a_step_costs(tmp_path):
    path = tmp_path / "trace.jsonl"
    with tiny_batcher() as batcher, served(batcher, ServeOptions(record=str(path))) as server:
        for number in range(4):
            ask(server, [number + 5] * 40, max_tokens=20)
    trace = read(path)
    assert sum(step.prefill for step in trace.steps) == 160
    assert sum(step.decodes for step in trace.steps) == 4 * 19
    one = [step.context for step in trace.steps][: len(trace.steps) // 4]
    assert one == [32, 40, *range(41, 60)]
    assert fit_cost(trace.steps).cost.seconds(0, 1, 50) > 0


def test_an_aborted_request_is_recorded_with_what_it_had(tmp_path):
    path = tmp_path / "trace.jsonl"
    with tiny_batcher() as batcher, served(batcher, ServeOptions(record=str(path))) as server:
        asked = {"json": body(HEAD, stream=True)}
        with slow_steps(batcher), server.client.stream("POST", PATH, **asked) as got:
            next(got.iter_text())
        server.wait_until_idle()
        wait_until(lambda: requests_of(path))
    (found,) = requests_of(path)
    assert found["finish"] == "abort"
    assert 0 < found["output_tokens"] < 200


def test_what_is_no_trace_is_never_overwritten(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(InvalidConfigError, match="is there already and is no trace; it is left as it is"):
        check_record(str(path))
    assert path.read_text() == "my notes\n"
    with pytest.raises(InvalidConfigError, match="cannot be written: No such file"):
        check_record(str(tmp_path / "nowhere" / "trace"))
    own = str(tmp_path / "own")
    other = pytest.raises(InvalidConfigError, match="being written by another server")
    with tiny_batcher() as batcher, served(batcher, ServeOptions(record=own)), other:
        check_record(own)
    finer = pytest.raises(InvalidConfigError, match="a trace with hashes of 4 tokens, not 8")
    with tiny_batcher(block_size=8) as batcher, finer:
        recording.Recorder(own, batcher)


def test_what_is_no_file_or_not_its_own_is_refused_and_keeps_its_mode(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o644)
    with pytest.raises(InvalidConfigError, match="is no file that lines can be kept in"):
        check_record(str(pipe))
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o644

    def not_allowed(file, mode):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(recording.os, "fchmod", not_allowed)
    with pytest.raises(InvalidConfigError, match="cannot be kept from others"):
        check_record(str(tmp_path / "trace"))


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path, monkeypatch):
    with tiny_batcher() as batcher:
        recorder = recording.Recorder(str(tmp_path / "trace"), batcher)
        monkeypatch.setattr(recording.os, "write", lambda file, line: len(line) - 1)
        with pytest.raises(InvalidConfigError, match="cannot be written: the disk is full"):
            recorder.begin()
        assert recorder not in batcher.hooks


def test_a_disk_that_hangs_at_the_end_gets_no_line_in_another_file(tmp_path, monkeypatch, caplog):
    path, goes_on, hangs = tmp_path / "trace", threading.Event(), threading.Event()
    write = os.write

    def slow(file, line):
        hangs.set()
        goes_on.wait()
        return write(file, line)

    with tiny_batcher() as batcher, recording.recording(str(path), batcher):
        monkeypatch.setattr(recording, "CLOSE_SECONDS", 0.1)
        monkeypatch.setattr(recording.os, "write", slow)
        batcher.generate([HEAD], max_new_tokens=3)
        assert hangs.wait(10)
    with open(tmp_path / "other", "wb", buffering=0):  # it would have the number of the trace, had that been closed
        goes_on.set()
        wait_until(lambda: len(lines_of(path)) > 1)
    assert not (tmp_path / "other").read_bytes()
    assert "ends here: the disk has not taken it for 0.1 s" in caplog.text


def test_a_disk_that_takes_nothing_ends_the_recording_before_it_takes_the_memory(tmp_path, monkeypatch, caplog):
    goes_on, write = threading.Event(), os.write
    with tiny_batcher() as batcher, recording.recording(str(tmp_path / "trace"), batcher):
        (recorder,) = [hook for hook in batcher.hooks if isinstance(hook, recording.Recorder)]
        monkeypatch.setattr(recording, "MOST_WAITING", 3)
        monkeypatch.setattr(recording.os, "write", lambda file, line: goes_on.wait() and write(file, line))
        batcher.generate([HEAD, HEAD[1:]], max_new_tokens=8)
        waiting = recorder._queue.qsize()
        goes_on.set()
    assert waiting == 3
    assert "the disk is slower than what is to be written" in caplog.text


def test_the_command_line_says_at_once_what_cannot_be_recorded(tmp_path, capsys):
    assert cli.main(["serve", "--port", "0", "--record", str(tmp_path)]) == 2
    assert "cannot be written: Is a directory" in capsys.readouterr().err


def test_a_line_that_was_torn_by_a_kill_ends_before_the_next_recording(tmp_path):
    path = tmp_path / "trace.jsonl"
    with tiny_batcher() as batcher:
        with served(batcher, ServeOptions(record=str(path))) as server:
            ask(server, HEAD)
        with path.open("ab") as file:
            file.write(b'{"arrival": 3, "prom')
        with served(batcher, ServeOptions(record=str(path))) as server:
            ask(server, HEAD)
    trace = read(path)
    assert (len(trace.requests), trace.skipped.count) == (2, 1)


def test_a_full_disk_ends_the_recording_with_one_line_and_nothing_else(tmp_path, monkeypatch, caplog):
    path = tmp_path / "trace.jsonl"
    with tiny_batcher() as batcher, served(batcher, ServeOptions(record=str(path))) as server:
        ask(server, HEAD)
        wait_until(lambda: requests_of(path))
        before, written = path.read_bytes(), []

        def full(file, line):
            written.append(line)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "hfpaged"):
            patch.setattr(recording.os, "write", full)
            for _ in range(3):
                ask(server, HEAD)
    assert path.read_bytes() == before
    assert len(written) == 1
    (line,) = [record.message for record in caplog.records if "--record" in record.message]
    assert line.endswith("ends here: No space left on device")


def test_a_server_that_is_killed_has_recorded_all_that_ended_before(tmp_path):
    path = tmp_path / "trace.jsonl"
    with tiny_batcher() as batcher, served(batcher, ServeOptions(record=str(path))) as server:
        for number in range(1, 4):
            ask(server, HEAD)
            wait_until(lambda number=number: len(requests_of(path)) == number)  # by now, and not when it stops
            assert path.read_bytes().endswith(b"\n")


def test_the_hook_does_no_work_in_the_thread_of_the_engine(tmp_path, monkeypatch):
    seen = []
    real = ChunkHasher.hashes
    monkeypatch.setattr(ChunkHasher, "hashes", lambda *given: seen.append(thread_name()) or real(*given))
    with tiny_batcher() as batcher, recording.recording(str(tmp_path / "trace"), batcher):
        batcher.generate([HEAD], max_new_tokens=3)
    assert seen == ["hfpaged-record"]


def thread_name():
    return threading.current_thread().name


def test_a_new_chunk_is_told_with_what_it_has_in_common_and_the_oldest_are_forgotten():
    hasher = ChunkHasher(bytes(16), 4, remembered=6)
    first = hasher.hashes(b"", array("q", range(12)))
    assert (len(first.hashes), first.like) == (3, None)
    again = hasher.hashes(b"", array("q", [0, 1, 2, 3, 4, 5, 99, 7, 8, 9]))
    assert again.hashes[0] == first.hashes[0]
    assert again.hashes[1] != first.hashes[1]
    assert again.like == Like(1, first.hashes[1], 2)
    assert hasher.hashes(b"other", array("q", range(12))).like is None
    end = hasher.hashes(b"other", array("q", range(10)))
    assert end.like is not None
    assert (end.like.place, end.like.common) == (2, 2)
    for number in range(50):
        hasher.hashes(b"", array("q", [number] * 8))
    assert hasher._count <= 7
    assert sum(map(len, hasher._behind.values())) == hasher._count
