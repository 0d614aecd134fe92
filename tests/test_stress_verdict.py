"""The rules of `hfpaged stress`, on numbers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from hfpaged.stress.facts import Facts, LeakedBlock, Trend
from hfpaged.stress.mix import PRESSURE, WEIGHTS, Lengths, Mix, Room
from hfpaged.stress.report import last_line
from hfpaged.stress.slope import slope
from hfpaged.stress.verdict import judge
from hfpaged.stress.watch import Sample


def samples(resident=lambda n, rng: 10**9, count=300, each=20, **how):
    rng = random.Random(1)
    return [
        Sample(n / 4, n * each, resident(n * each, rng), how.get("allocated", 0), how.get("reserved", 0), 90, 5, 100)
        for n in range(count)
    ]


def facts(**changes):
    """A clean run."""
    plain = Facts(
        seconds=75.0, planned=60.0, received=100, finished=80, aborted=12, rejected=8, failed=0, in_flight=0,
        own_counts={"received": 100, "finished": 80, "aborted": 12, "rejected": 8}, kinds=Counter(), tokens=5000,
        steps=400, preemptions=3, recomputed=0.02, peak=0.98, full_share=0.8, num_blocks=100, samples=samples(),
        first_token=[0.2] * 80, per_token=[0.01] * 80, checked=9, close=0, differences=[], errors=[], broken=None,
        leaked=[], grown=[], other_rounds=20, other_out_of_blocks=2,
    )  # fmt: skip
    return replace(plain, **changes)


def verdict(**changes):
    return [finding.name for finding in judge(facts(**changes))]


def test_a_clean_run_has_no_finding_and_says_so():
    assert verdict() == []
    assert last_line(facts(), [], False).startswith("clean: 100 requests in 75 s")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"differences": ["a request"]}, "wrong"),
        ({"leaked": [LeakedBlock(7)]}, "leak"),
        ({"broken": "books\nblock 3: step 1"}, "leak"),
        ({"failed": 2, "finished": 78}, "failed"),
        ({"stuck": 1}, "failed"),
        ({"received": 101}, "counters"),
        ({"own_counts": {"received": 100, "finished": 79, "aborted": 13, "rejected": 8}}, "counters"),
        ({"recomputed": 0.16}, "thrash"),
        ({"peak": 0.89}, "unfilled"),
        ({"checked": 0}, "unfilled"),
        ({"per_token": [0.01] * 40 + [0.02] * 40}, "slower"),
    ],
)
def test_each_rule_finds_what_it_is_for_and_nothing_else(changes, name):
    assert verdict(**changes) == [name]


def test_a_clean_run_claims_no_more_than_it_has_seen():
    """Too few samples, or such noise that a leak of 12 MiB could hide in it, exclude no growth."""
    assert "no growth" in last_line(facts(), [], False)
    noisy = samples(lambda n, rng: 10**9 + rng.randrange(5 * 10**8))
    for seen in (samples(count=6), noisy):
        run = facts(samples=seen)
        assert judge(run) == []
        assert "too short to exclude growth" in last_line(run, [], False)


def test_the_worst_comes_first_and_the_others_are_named():
    found = facts(peak=0.5, recomputed=0.5, leaked=[LeakedBlock(7, ("sequence 3 (r)",), ("step 1: allocate",))])
    findings = judge(found)
    assert [each.name for each in findings] == ["leak", "thrash", "unfilled"]
    assert "(also: thrash, unfilled)" in last_line(found, findings, False)
    assert findings[0].suspects == ("block 7: held by sequence 3 (r); step 1: allocate",)


def test_a_block_without_history_says_how_to_get_one():
    assert "no history without --debug" in str(LeakedBlock(7))


def test_short_runs_are_no_measure_of_what_grows_slower():
    assert verdict(per_token=[0.01] * 40 + [0.02] * 40, seconds=20.0) == []
    assert Trend.of([0.01] * 20) is None


def test_a_steady_leak_is_growth_and_noise_is_not():
    leak = samples(lambda n, rng: 10**9 + 8000 * n + rng.randrange(2**20))
    assert verdict(samples=leak) == ["growth"]
    noisy = samples(lambda n, rng: 10**9 + rng.randrange(64 * 2**20))
    assert verdict(samples=noisy) == []
    little = samples(lambda n, rng: 10**9 + 300 * n)
    assert verdict(samples=little) == []


def test_growth_in_the_warm_up_is_none():
    warming = samples(lambda n, rng: 10**9 + 50_000 * min(n, 1900))
    assert verdict(samples=warming) == []


def test_device_memory_is_held_to_the_same_rule():
    growing = [each._replace(reserved=each.requests * 8000 + 1) for each in samples()]
    (found,) = judge(facts(samples=growing))
    assert found.text.startswith("device memory grows by 8,000")


def test_a_slope_has_the_interval_that_its_noise_gives():
    rng = random.Random(3)
    inside = 0
    for _ in range(200):
        ys = [5.0 * x + rng.gauss(0, 100) for x in range(100)]
        found = slope(range(100), ys)
        inside += abs(found.each - 5.0) <= found.margin
    assert 180 <= inside <= 199


def test_neighbours_that_resemble_each_other_count_for_fewer():
    rng, wander, ys = random.Random(4), 0.0, []
    for _ in range(300):
        wander = 0.9 * wander + rng.gauss(0, 100)
        ys.append(wander)
    shuffled = rng.sample(ys, len(ys))
    assert slope(range(300), ys).margin > 2 * slope(range(300), shuffled).margin


def test_too_few_points_have_no_slope():
    assert slope([1, 2, 3], [1, 2, 3]) is None
    assert slope([2] * 10, range(10)) is None


@pytest.mark.parametrize(
    ("room", "sequences", "longest"),
    [
        (Room(128, 4, [None]), 16, 511),
        (Room(24, 4, [None]), 16, None),
        (Room(10**5, 16, [None, None]), 4, 64),
        (Room(10, 4, [None]), 2, 30),
        (Room(60, 4, [None, 12, 12]), 4, 200),
        (Room(60, 4, [12]), 4, 200),
    ],
)
def test_all_requests_fit_and_every_kind_comes(room, sequences, longest):
    lengths = Lengths.filling(room, sequences, longest)
    mix = Mix(random.Random(0), range(3, 99), lengths, sequences)
    made = [mix.attempt() for _ in range(400)]
    assert {each.kind for each in made} == set(WEIGHTS)
    for each in made:
        if each.kind != "too long":
            length = len(each.prompt) + each.settings["max_new_tokens"]
            assert 0 < length <= lengths.longest
            assert longest is None or length <= longest
            assert room.blocks(length) <= max(room.num_blocks / 2, 2)
    assert 0.05 < sum(each.abort_after is not None for each in made) / len(made) < 0.3
    assert {mix.attempt(fills=True).kind for _ in range(9)} == {"long prompt"}


def test_lengths_fill_a_pool_of_layer_groups_with_windows():
    room = Room(1000, 4, [None, 12])
    mean = Lengths.filling(room, 10, None).mean
    assert 10 * room.blocks(mean) == pytest.approx(PRESSURE * 1000, rel=0.02)
    assert room.blocks(5) == 4
    assert room.blocks(40) == 10 + 4


def test_the_same_seed_asks_for_the_same_and_another_for_something_else():
    def asked(seed):
        mix = Mix(random.Random(seed), range(3, 99), Lengths.filling(Room(128, 4, [None]), 16, None), 16)
        return [mix.attempt() for _ in range(50)]

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


def test_no_request_has_more_sequences_than_may_run():
    mix = Mix(random.Random(0), range(3, 99), Lengths.filling(Room(128, 4, [None]), 1, None), 1)
    assert {mix.attempt().sequences for _ in range(100)} == {1}
    assert Lengths.filling(Room(128, 4, [None]), 16, None, mean=30).mean == 30
