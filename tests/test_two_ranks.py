"""The harness of the tests with several processes: what it gives back, and that it always ends."""

from __future__ import annotations

import os
import time

import pytest
import two_ranks

WORKER = "two_ranks_worker.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return two_ranks.once(tmp_path_factory, WORKER, "word", RANKS_GRACE="2")


def test_each_rank_gives_its_values_back(run):
    first, second = run.of("0 add")
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["sum"].tolist() == second["sum"].tolist() == [3]
    assert first["said"] == ["word"]
    assert first["threads"] == 1


def test_a_case_that_failed_on_one_rank_is_told_and_the_next_one_runs(run):
    with pytest.raises(AssertionError, match="what rank 1 says"):
        run.of("1 wrong_on_rank_1")
    assert run.of("2 add")[1]["sum"].tolist() == [3]


def test_a_rank_that_fails_while_the_other_waits_ends_both(run):
    with pytest.raises(AssertionError, match="what rank 0 says"):
        run.of("3 alone_in_an_exchange")
    with pytest.raises(AssertionError, match="did not come to the end"):
        run.of("4 never")
    assert run.fault
    with pytest.raises(AssertionError, match="--- rank 1 wrote"):
        run.check()


def test_ranks_that_hang_say_where_and_are_ended(tmp_path):
    with two_ranks.started(tmp_path, WORKER, HANGS="1") as ranks:
        fault = two_ranks.wait(ranks, timeout=6)
    assert "the ranks [0, 1] were not done after 6 s" in fault
    assert 'two_ranks_worker.py", line' in ranks[1].output
    assert all(rank.process.poll() is not None for rank in ranks)


def test_no_rank_outlives_an_error_of_the_test(tmp_path):
    def fail():
        with two_ranks.started(tmp_path, WORKER, HANGS="1") as ranks:
            pids.extend(rank.process.pid for rank in ranks)
            raise KeyboardInterrupt

    pids = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    time.sleep(0.1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
