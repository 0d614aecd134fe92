"""`hfpaged serve --tp`: one server over two processes answers as one process does, ends as it should, and says so."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import time

import pytest
import serving
import two_ranks

from hfpaged.errors import InvalidConfigError
from hfpaged.serve import tp_flags

pytestmark = pytest.mark.usefixtures("one_thread")

SECONDS = 120  # for what takes a moment where nothing else runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return serving.save(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def expected():
    """The text of one process."""
    with serving.tiny_batcher() as batcher:
        return batcher.generate([serving.PROMPT], max_new_tokens=200, ignore_eos=True, do_sample=False)[0].text


def started(folder, name):
    arguments = ("hfpaged.serve", str(folder), "--tp", "2", "--port", "0", "--kv-cache-memory", "2MiB")
    return two_ranks.started(folder.parent / name, "-m", *arguments)


def port_of(ranks):
    return int(_wait(lambda: re.search(r"ready: http://127.0.0.1:(\d+)/v1", ranks[0].output), ranks)[1])


def _wait(look, ranks):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError("\n".join(rank.output for rank in ranks))


class Answer:
    """A streamed one, of which no more is read than asked for."""

    def __init__(self, port, **asked):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        body = json.dumps(serving.body(stream=True, **asked))
        self._connection.request("POST", serving.PATH, body, {"Content-Type": "application/json"})
        self._lines = self._connection.getresponse()

    def events(self):
        for line in self._lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def text_of(events):
    return "".join(event["choices"][0]["text"] for event in events)


def ended(ranks):
    """Exit codes, when all have ended."""
    _wait(lambda: all(rank.process.poll() is not None for rank in ranks), ranks)
    return [rank.process.returncode for rank in ranks]


def test_streamed_answers_are_those_of_one_process_and_the_end_waits_for_them(folder, expected):
    with started(folder, "ends") as ranks:
        port = port_of(ranks)
        assert text_of(Answer(port).events()) == expected
        events = Answer(port).events()
        begun = [next(events)]
        for rank in ranks:  # as torchrun does
            rank.process.send_signal(signal.SIGTERM)
        assert text_of([*begun, *events]) == expected
        assert ended(ranks) == [0, 0]
        assert "2 ranks; each has:" in ranks[0].output
        assert "stopped: no request is left" in ranks[0].output
        assert "INFO" not in ranks[1].output


def test_a_rank_that_is_killed_ends_the_server_and_requests_are_told(folder):
    with started(folder, "killed") as ranks:
        events = Answer(port_of(ranks)).events()
        next(events)
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        *_, last = events
        assert last["error"]["code"] == "rank_lost"
        assert "rank 1 of 2 has died" in last["error"]["message"]
        assert ended(ranks) == [1, -signal.SIGKILL]
        assert "rank 1 of 2 has died: its connections are closed" in ranks[0].output
        assert "Traceback" not in ranks[0].output


def asked(*words):
    parser = argparse.ArgumentParser()
    tp_flags.add_flags(parser.add_argument_group())
    for name in ("model", "adapter", "device"):
        parser.add_argument(f"--{name}")
    return parser.parse_args(words)


TWO = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(("words", "environ", "size"), [
    ((), {}, 1),
    ((), {"WORLD_SIZE": "2"}, 1),  # of something else than torchrun
    (("--tp",), TWO, 2),
    (("--tp", "2"), TWO, 2),
    (("--tensor-parallel-size", "1"), {}, 1),
])  # fmt: skip
def test_the_size_is_what_torchrun_has_started(words, environ, size):
    assert tp_flags.size_of(asked(*words), environ) == size


@pytest.mark.parametrize(("words", "environ", "said"), [
    (("--tp", "--model", "m"), {}, "torchrun --nproc-per-node 2 -m hfpaged.serve m --tp"),
    (("--tensor-parallel-size", "4"), {}, "torchrun --nproc-per-node 4 -m hfpaged.serve --tp"),
    (("--tp", "4"), TWO, "--tensor-parallel-size 4, and torchrun has started 2 processes"),
    ((), TWO, "each of them would be a server of its own; add --tp"),
    (("--tp", "--adapter", "a=b"), TWO, "merge it into the model"),
    (("--tp", "--device", "cuda:1"), TWO, "leave --device out"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_with_what_to_type(words, environ, said):
    with pytest.raises(InvalidConfigError, match=re.escape(said)):
        tp_flags.size_of(asked(*words), environ)


def test_replicas_are_not_split():
    with pytest.raises(InvalidConfigError, match="--tp with --replicas"):
        tp_flags.check_alone(2)
