"""Replays of several replicas: the judges are batchers behind the same choice, and a replay of one."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from replays import COST, asked, run
from replica_traffic import STEP_SECONDS, Traffic
from stub_batcher import StubBatcher, going_on
from test_replay import VARIANTS, same, traces
from test_replay_batcher import Record, telling

from hfpaged.planner.replay import Replay
from hfpaged.planner.replay_engine import ReplayEngine
from hfpaged.planner.replay_fleet import SECRET, ReplayFleet
from hfpaged.planner.replay_report import best_of
from hfpaged.planner.trace import Trace, TraceRequest
from hfpaged.planner.variant import Variant
from hfpaged.replicas.reporting import Reporter
from hfpaged.replicas.routing import Routing
from hfpaged.replicas.routing_hash import RoutingHash, keys_for

BLOCK = 8
SIZES = {"num_blocks": 26, "block_size": BLOCK, "max_num_seqs": 4, "max_num_batched_tokens": 64}
FREE = {"max_step_stretch": None, "max_num_queued_requests": None}
APART = 2.5  # seconds from one prompt to the next: a report comes in between


def conversation():
    """Prompts with four heads, some of which another one begins with; and some that go on with an answer."""
    chance = random.Random(5)
    heads = [[3, number, *[chance.randrange(3, 9) for _ in range(38)]] for number in range(4)]
    heads[3] = [*heads[0][:20], *heads[3][20:]]
    for number in range(40):
        prompt = chance.choice(heads) + [chance.randrange(3, 90) for _ in range(chance.randrange(2, 30))]
        yield prompt
        if number % 7 == 0:
            yield [*prompt, *going_on(prompt, 6), 5, 6, 7]


def by_batchers(prompts):
    """(replica, tokens found) of each, one after the other."""
    batchers, time = [StubBatcher("llama", **SIZES) for _ in range(2)], SimpleNamespace(now=0.0)
    reporters, records = [Reporter(batcher, SECRET) for batcher in batchers], [Record(), Record()]
    for batcher, record in zip(batchers, records, strict=True):
        batcher.hooks.append(record)
    routing, made = Routing(clock=lambda: time.now, rng=random.Random(0)), []
    for number, prompt in enumerate(prompts):
        time.now = number * APART
        told = {str(place): reporter.stats() for place, reporter in enumerate(reporters)}
        hashes = RoutingHash(SECRET).chain(keys_for(None, None), prompt, BLOCK)
        best = routing.choose(hashes, told, {str(place): len(b.loop.requests) for place, b in enumerate(batchers)})[0]
        routing.sent(hashes, best)
        batchers[int(best)].add_request(prompt, request_id=str(number), max_new_tokens=6, do_sample=False)
        while batchers[int(best)].has_work:
            batchers[int(best)].step()
        made.append((int(best), records[int(best)].hits[str(number)]))
    return made


def by_replay(prompts):
    requests = [asked(prompt, going_on(prompt, 6), 1, number * APART) for number, prompt in enumerate(prompts)]
    records = []

    class Told(ReplayEngine):
        def __new__(cls, *parts, **options):
            records.append(Record())
            return telling(records[-1])(*parts, **options)

    outcome, _ = run(Trace(requests, 1), Variant(**SIZES, **FREE, replicas=2), engine=Told)
    found = {int(name): (place, hit) for place, record in enumerate(records) for name, hit in record.hits.items()}
    assert [part.requests for part in outcome.parts] == [len(record.hits) for record in records]
    assert outcome.hit_tokens == sum(hit for _, hit in found.values())
    return [found[number] for number in range(len(prompts))]


@pytest.mark.usefixtures("one_thread")
def test_prompts_go_where_batchers_behind_the_router_get_them_and_hit_as_much():
    prompts = list(conversation())
    made = by_batchers(prompts)
    assert by_replay(prompts) == made
    assert {replica for replica, _ in made} == {0, 1}
    assert sum(hit for _, hit in made) > 20 * 40
    assert any(made[number][1] < made[number - 20][1] for number in range(20, len(made)))  # evicted meanwhile


@settings(max_examples=15, deadline=None)
@given(traces(), VARIANTS)
def test_a_fleet_of_one_is_the_engine_itself(trace, variant):
    class Fleet(Replay):
        def _engine(self, now):
            return ReplayFleet(self.variant, self._cost, now, self._make)

    alone = Variant(**{**vars(variant), "replicas": 1, "router": "in-turn"})
    assert same(Fleet(trace, alone, COST).run()) == same(run(trace, alone)[0])


def traffic(seed):
    arrivals = list(Traffic(seed=seed).arrivals())
    return Trace([asked(prompt, going_on(prompt, 8), 1, step * STEP_SECONDS) for step, prompt in arrivals], 1)


@pytest.mark.parametrize("seed", [0, 3])
def test_eight_system_prompts_hit_as_on_one_replica_of_all_blocks_and_much_more_than_in_turn(seed):
    sizes = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 256} | FREE
    one, _ = run(traffic(seed), Variant(288, **sizes))
    near, _ = run(traffic(seed), Variant(144, **sizes, replicas=2))
    turn, _ = run(traffic(seed), Variant(144, **sizes, replicas=2, router="in-turn"))
    assert near.hit_rate >= 0.9 * one.hit_rate > 0.6
    assert near.hit_rate >= 1.5 * turn.hit_rate
    assert min(part.requests for part in near.parts) > 160 / 4
    assert [part.requests for part in turn.parts] == [80, 80]
    assert near.finished == turn.finished == 160


def test_what_shares_no_prefix_goes_to_the_less_loaded_of_two():
    trace = Trace([TraceRequest(0.01 * number, 40, 30) for number in range(60)], 4)
    outcome, _ = run(trace, Variant(200, prefix_sharing=False, **FREE, replicas=3))
    assert all(17 <= part.requests <= 23 for part in outcome.parts)
    assert outcome.seconds < run(trace, Variant(200, prefix_sharing=False, **FREE))[0].seconds


def test_the_best_is_none_that_sends_in_turn_as_no_server_does():
    trace = Trace([TraceRequest(0.1 * number, 20, 8, (1,)) for number in range(8)], 16)
    turn, near = (run(trace, Variant(50, replicas=2, router=router))[0] for router in ("in-turn", "prefix"))
    soon = replace(turn, ttft=replace(turn.ttft, p99=0.0))
    assert best_of([soon, near]) is near
    assert best_of([soon]) is soon
