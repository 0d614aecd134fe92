"""Which replica a request goes to, by figures alone."""

from __future__ import annotations

import random
from array import array

import pytest

from hfpaged.errors import InvalidConfigError
from hfpaged.replicas.affinity import Candidate, Thresholds, ranked
from hfpaged.replicas.recent_prefixes import MOST_REMEMBERED, RecentPrefixes
from hfpaged.replicas.routing import Routing
from hfpaged.replicas.routing_stats import RoutingStats, read_stats


def order(*candidates, num_blocks=20, rng=0, **thresholds):
    return [each.name for each in ranked(candidates, num_blocks, Thresholds(**thresholds), random.Random(rng))]


def test_the_longest_match_wins_over_a_shorter_queue():
    assert order(Candidate("a", matched=5, load=0), Candidate("b", matched=10, load=4)) == ["b", "a"]


def test_behind_the_longest_match_come_the_next_ones_whatever_they_have_to_do():
    some = Candidate("c", matched=5), Candidate("b", matched=10, load=5), Candidate("a", matched=20, load=7)
    assert order(*some) == ["a", "b", "c"]


def test_about_equal_matches_go_to_the_less_loaded():
    near = Candidate("a", matched=9, load=0), Candidate("b", matched=10, load=4)
    assert order(*near) == ["a", "b"]
    assert order(*near, gain=0.0) == ["b", "a"]


def test_a_replica_with_a_long_queue_or_without_blocks_is_passed_over_for_the_next_best():
    others = Candidate("b", matched=6), Candidate("c")
    assert order(Candidate("a", matched=20, load=6, seats=4), *others) == ["a", "b", "c"]
    assert order(Candidate("a", matched=20, load=7, seats=4), *others) == ["b", "c", "a"]
    assert order(Candidate("a", matched=20, free=0.04), *others) == ["b", "c", "a"]
    assert order(Candidate("a", matched=20, load=3, seats=4, free=0.06), *others) == ["a", "b", "c"]


def test_a_queue_is_long_by_the_seats_there_are():
    behind = Candidate("b", load=40)
    for load, first in ((80, "a"), (81, "b")):
        assert order(Candidate("a", matched=20, load=load, seats=64), behind)[0] == first
    assert order(Candidate("a", matched=20, load=66, seats=64), behind, queue=0.0)[0] == "a"
    assert order(Candidate("a", matched=20, load=67, seats=64), behind, queue=0.0)[0] == "b"


def test_a_replica_that_would_refuse_is_passed_over_while_another_one_would_not():
    refusing = Candidate("a", matched=20, load=5, seats=4, most=5)
    assert order(refusing, Candidate("b", load=4, seats=4, most=5)) == ["b", "a"]
    assert order(refusing, Candidate("b", load=4, seats=4, most=5, free=0.0)) == ["b", "a"]
    assert order(refusing, Candidate("b", load=5, seats=4, most=5)) == ["a", "b"]


def test_where_all_are_full_the_longest_match_wins_again():
    full = Candidate("a", matched=20, load=8, seats=4), Candidate("b", load=7, seats=4)
    assert order(*full) == ["a", "b"]


def test_a_replica_with_many_more_requests_than_another_is_passed_over():
    assert order(Candidate("a", matched=20, load=28), Candidate("b", load=10)) == ["a", "b"]
    assert order(Candidate("a", matched=20, load=29), Candidate("b", load=10)) == ["b", "a"]
    assert order(Candidate("a", matched=20, load=9, seats=4), Candidate("b", load=5, seats=4), ratio=1.0, slack=3) == [
        "b",
        "a",
    ]


def test_without_a_match_the_less_loaded_of_two_by_chance():
    loads = [Candidate(str(load), load=load) for load in range(4)]
    firsts = {order(*loads, rng=seed)[0] for seed in range(50)}
    assert firsts == {"0", "1", "2"}  # never the most loaded
    assert all(order(*loads, rng=seed)[1:] == sorted(order(*loads, rng=seed)[1:]) for seed in range(5))


def test_at_equal_loads_the_one_that_was_sent_less():
    for seed in range(5):
        assert order(Candidate("a", placed=7), Candidate("b", placed=3), rng=seed) == ["b", "a"]


def test_one_replica_and_none():
    assert order(Candidate("a", load=9, seats=1, free=0)) == ["a"]
    assert order() == []


@pytest.mark.parametrize("wrong", [{"gain": 1.5}, {"queue": 2.0}, {"free": -0.1}, {"ratio": 0.5}, {"slack": -1}])
def test_thresholds_that_cannot_be_are_refused(wrong):
    with pytest.raises(InvalidConfigError, match=next(iter(wrong))):
        Thresholds(**wrong)


class Clock:
    time = 100.0

    def __call__(self):
        return self.time


def told(*hashes, **more):
    return {"prefixes": array("Q", hashes).tobytes(), "running": 0, "waiting": 0, "seats": 8, "free": 1.0, **more}


def a_prompt(*hashes):
    return array("Q", hashes).tobytes()


def routing(clock=None, **rest):
    return Routing(clock=clock or Clock(), rng=random.Random(0), **rest)


def test_a_burst_of_one_new_prefix_goes_to_one_replica_before_any_has_told_of_it():
    for seed in range(5):
        chosen = Routing(clock=Clock(), rng=random.Random(seed))
        stats = {"a": told(), "b": told(), "c": told()}
        assert len({chosen.choose(a_prompt(1, 2, 3, 10 + n), stats, {})[0] for n in range(6)}) == 1


def test_what_a_replica_tells_is_known_to_a_router_that_has_sent_nothing():
    for _ in range(2):  # two ingresses
        assert routing().choose(a_prompt(1, 2, 3), {"a": told(), "b": told(7, 2)}, {})[0] == "b"


def test_what_a_replica_takes_is_what_it_tells():
    loads = {"a": 5, "b": 0}
    for most, first in ((5, "b"), (6, "a"), (None, "a")):
        assert routing().choose(a_prompt(1, 2), {"a": told(1, 2, most=most), "b": told()}, loads)[0] == first


def test_what_was_sent_is_forgotten_after_a_while_unless_it_is_told_of():
    clock = Clock()
    chosen = routing(clock, memory_seconds=20.0)
    first = chosen.choose(a_prompt(1, 2), {"a": told(), "b": told()}, {})[0]
    other = {"a": "b", "b": "a"}[first]
    clock.time += 19
    assert chosen.choose(a_prompt(1, 2), {first: told(), other: told()}, {first: 1, other: 0})[0] == first
    clock.time += 21
    assert chosen.choose(a_prompt(1, 2), {first: told(), other: told()}, {first: 1, other: 0})[0] == other
    clock.time += 21
    assert chosen.choose(a_prompt(1, 2), {first: told(1, 2), other: told()}, {first: 1, other: 0})[0] == first


def test_a_replica_that_was_sent_much_long_ago_gets_its_share_of_what_comes_now():
    clock = Clock()
    chosen = routing(clock, memory_seconds=20.0)
    for each in range(50):
        assert chosen.choose(a_prompt(each), {"old": told()}, {}) == ["old"]
    found = []
    for each in range(20):
        clock.time += 30
        found.append(chosen.choose(a_prompt(1000 + each), {"old": told(), "new": told()}, {})[0])
    assert 5 <= found.count("old") <= 15


def test_a_replica_that_got_a_request_in_place_of_the_chosen_one_is_remembered():
    chosen = routing()
    first = chosen.choose(a_prompt(1, 2), {"a": told(), "b": told()}, {})[0]
    other = {"a": "b", "b": "a"}[first]
    chosen.sent(a_prompt(1, 2), other)
    assert chosen.choose(a_prompt(1, 2), {first: told(), other: told()}, {first: 1, other: 0})[0] == other


def test_replicas_that_have_gone_are_forgotten():
    chosen = routing()
    first = chosen.choose(a_prompt(1, 2), {"a": told(), "b": told()}, {})[0]
    chosen.keep({"a", "b"} - {first})
    assert chosen._recent.placed(first, 100.0) == 0
    assert first not in chosen._told
    assert chosen.choose(a_prompt(1, 2), {"c": told()}, {}) == ["c"]


def test_memory_is_bounded():
    recent = RecentPrefixes(limit=10)
    recent.note("a", range(25), 0.0)
    assert recent.placed("a", 1.0) == 10
    assert recent.matched("a", {each: each + 1 for each in range(25)}, frozenset(), 1.0) == 25
    assert recent.matched("a", {each: each + 1 for each in range(15)}, frozenset(), 1.0) == 0


def test_all_that_can_be_remembered_is_forgotten_in_one_look():
    """That stands in the way of every stream of an ingress: it takes 30 ms, and no 28 s."""
    recent = RecentPrefixes(seconds=20.0)
    recent.note("a", range(2 * MOST_REMEMBERED), 0.0)
    assert recent.placed("a", 19.0) == MOST_REMEMBERED
    assert recent.placed("a", 20.0) == 0


def test_what_is_sent_again_is_remembered_longest():
    recent = RecentPrefixes(limit=2)
    for each in (1, 2, 1, 3):
        recent.note("a", [each], 0.0)
    assert [recent.matched("a", {each: 1}, frozenset(), 1.0) for each in (1, 2, 3)] == [1, 0, 1]


def test_the_router_knows_loads_better_than_stats_that_were_told_a_while_ago():
    stats = {"a": told(running=3, waiting=1), "b": told(running=2)}
    assert routing().choose(a_prompt(9), stats, {})[0] == "b"
    assert routing().choose(a_prompt(9), stats, {"a": 0, "b": 2})[0] == "a"
    assert routing().choose(a_prompt(9), stats, {"a": None, "b": 5})[0] == "a"


GARBAGE = [
    None, {}, [], "x", 7, {"prefixes": "abc"}, {"prefixes": b"12345"}, {"prefixes": [1, 2]}, {"prefixes": None},
    {"prefixes": b"12345678", "running": "many", "waiting": -3, "seats": 0, "free": float("nan")},
    {"running": 1.5, "waiting": None, "seats": "8", "free": "all"}, {"free": float("inf")}, {b"prefixes": 1},
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_a_replica_that_tells_nonsense_is_taken_for_one_that_tells_nothing(garbage):
    read = read_stats(garbage)
    assert read._replace(prefixes=frozenset()) == RoutingStats()
    chosen = routing()
    assert sorted(chosen.choose(a_prompt(1, 2), {"a": garbage, "b": told(1, 2)}, {})) == ["a", "b"]
    assert chosen.choose(a_prompt(1, 2), {"a": garbage, "b": told(1, 2)}, {})[0] == "b"


def test_stats_are_read_once_for_each_time_they_are_told(monkeypatch):
    from hfpaged.replicas import routing as module

    calls = []
    monkeypatch.setattr(module, "read_stats", lambda given: calls.append(1) or read_stats(given))
    chosen, stats = routing(), {"a": told(1)}
    for _ in range(3):
        chosen.choose(a_prompt(1), stats, {})
    assert len(calls) == 1
    chosen.choose(a_prompt(1), {"a": told(1)}, {})
    assert len(calls) == 2
