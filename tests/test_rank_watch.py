"""When one of two ranks dies, fails, hangs or leaves, the other says so and ends; none waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import two_ranks

WORKER = Path(__file__).parent / "rank_watch_worker.py"
RAISED = 3  # the exit code of a rank whose scenario raised


class Rank(NamedTuple):
    code: int | str
    gave: object
    log: str


@pytest.fixture(scope="module")
def became(tmp_path_factory):
    """Of each scenario, what became of the two ranks."""
    folder = tmp_path_factory.mktemp("watch")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads((folder / "codes.json").read_text())

    def of(name):
        return [
            Rank(
                codes[f"{name}{rank}"],
                json.loads(file.read_text()) if (file := folder / f"{name}{rank}.json").exists() else None,
                (folder / f"{name}{rank}.log").read_text(),
            )
            for rank in range(2)
        ]

    return of


def _path():
    root = two_ranks.TESTS.parent
    return os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])


def test_a_rank_that_is_killed_is_named_by_rank_0_in_the_middle_of_a_step(became):
    first, second = became("killed")
    assert (first.code, second.code) == (RAISED, -9)
    assert "RankLostError: rank 1 of 2 has died: its connections are closed; none of the ranks" in first.log


def test_rank_0_that_is_killed_is_named_by_those_that_follow(became):
    first, second = became("leader_killed")
    assert (first.code, second.code) == (-9, RAISED)
    assert "RankLostError: rank 0 of 2 has died" in second.log


def test_a_rank_that_waits_in_vain_ends(became):
    first, second = became("killed_in_vain")
    assert (first.code, second.code) == (1, -9)
    assert "rank 0 of 2 ends: it waits for another rank in vain: rank 1 of 2 has died" in first.log


def test_a_rank_that_fails_tells_the_others_why(became):
    first, second = became("fails")
    assert first.code in (RAISED, 1)  # 1: the other one took long to end, and rank 0 waited in vain
    assert second.code == RAISED
    for rank in (first, second):
        assert "rank 1 of 2 failed in the middle of a step: MemoryError: no room" in rank.log


def test_a_rank_that_is_stopped_is_told_of_and_given_up_in_the_end(became):
    first, second = became("stopped")
    assert (first.code, second.code) == (1, "no end")
    said = first.log
    assert said.index("rank 1 of 2 has not been heard of for") < said.index("no rank of the group can go on")


def test_a_rank_that_is_stopped_does_not_keep_rank_0_from_its_end(became):
    first, second = became("stopped_at_the_end")
    assert (first.code, second.code) == (1, "no end")
    assert "rank 1 of 2 has not been heard of for" in first.log


def test_a_rank_that_leaves_too_early_is_told_what_it_should_have_called(became):
    first, second = became("leaves")
    assert (first.code, second.code) == (RAISED, 0)
    assert "rank 1 of 2 has come to the end of its program while others need it" in first.log
    assert "call follow(), until rank 0 calls close()" in first.log


def test_rank_0_that_ends_in_the_middle_of_something_does_not_leave_others_waiting(became):
    first, second = became("leader_ends_in_a_thread")
    assert (first.code, second.code) == (0, 1)
    assert "rank 0 of 2 has come to the end of its program while others need it" in second.log


def test_ranks_that_follow_are_let_go_when_the_program_of_rank_0_ends(became):
    first, second = became("leader_leaves")
    assert (first.code, second.code) == (0, 0)
    assert (first.gave, second.gave) == ("left", [3])


def test_ctrl_c_waits_for_the_step_and_reaches_all_ranks(became):
    first, second = became("interrupted")
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert first.gave == second.gave == [None]


def test_plans_of_any_length_and_what_is_raised_go_through_one_channel_and_another_behind_it(became):
    first, second = became("of_all_lengths")
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert first.gave == [{"told": "by rank 0"}, [], ["division by zero"], True, None]
    assert second.gave == [{"told": "by rank 0"}, [3, 10**5, 3, 10**5, 3], ["division by zero"], True, None]


def test_of_two_threads_that_follow_one_does_and_later_ones_are_told_that_it_is_closed(became):
    first, second = became("follows_in_a_thread")
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "has closed this batcher" in first.gave[0]
    assert second.gave == [3, *first.gave]


def test_forwards_of_two_groups_in_two_threads_do_not_meet(became):
    first, second = became("two_groups")
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert first.gave == second.gave == [2] * 400


def test_a_rank_that_dies_before_there_is_a_batcher_is_named(became):
    first, second = became("killed_at_the_start")
    assert (first.code, second.code) == (RAISED, -9)
    assert "RankLostError: rank 1 of 2 has died" in first.log


def test_a_rank_that_fails_before_there_is_a_batcher_does_not_leave_others_waiting(became):
    first, second = became("fails_at_the_start")
    assert (first.code, second.code) == (1, RAISED)
    assert "MemoryError: no room" in second.log
    assert "rank 1 of 2 has come to the end of its program while others need it" in first.log
