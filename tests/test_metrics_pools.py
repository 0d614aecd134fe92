"""What lies in a pool, counted from copies of its tables; and counts that outlive who kept them."""

from __future__ import annotations

import gc
import random
import threading

import pytest
from plain_count import tokens_by_group
from stub_batcher import StubBatcher

from hfpaged import KVPool, OutOfBlocksError, live_pools
from hfpaged.block_table import BlockCopy
from hfpaged.engine import registry
from hfpaged.kv_format import resolve_format
from hfpaged.layer_groups import LayerGroup
from hfpaged.live_pools import PoolCounts
from hfpaged.outliving import Outliving
from hfpaged.pool_contents import read_pool
from hfpaged.stream_rule import StreamRule

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = {
    "full": (LayerGroup(None, (0, 1)),),
    "a window": (LayerGroup(None, (0, 1)), LayerGroup(6, (2, 3))),
}


def pool_of(groups=GROUPS["full"], num_blocks=60):
    return KVPool(groups, block_size=4, kv_format=resolve_format("auto"), num_blocks=num_blocks)


def used_by_group(pool):
    """The ids of all tables, counted as plainly as can be."""
    held = [set() for _ in pool.groups]
    for sequence in pool.manager._sequences:
        for blocks, table in zip(held, sequence.tables, strict=True):
            blocks.update(table.blocks)
    return [len(blocks) for blocks in held]


class Doing:
    """Whatever may happen to the sequences of a pool, at random."""

    def __init__(self, pool, seed, rules):
        self.pool, self.manager, self.rng, self.rules = pool, pool.manager, random.Random(seed), rules
        self.sequences, self.holders = [], []

    def something(self):
        deed = self.rng.choice(("create", "grow", "grow", "fork", "trim", "free", "leave", "hold"))
        if deed == "create" or not self.sequences:
            self.sequences.append(self.manager.create([self.rng.choice(self.rules) for _ in self.pool.groups]))
        else:
            getattr(self, deed)(self.rng.choice(self.sequences))

    def grow(self, chosen):
        try:
            self.manager.grow([(chosen, self.rng.randint(1, 9))])
        except OutOfBlocksError:
            while self.holders:
                self.manager.free(self.holders.pop())
            for sequence in list(self.sequences)[:3]:
                self.free(sequence)

    def fork(self, chosen):
        self.sequences.append(self.manager.fork(chosen))

    def trim(self, chosen):
        self.manager.trim(chosen, self.rng.randint(max(table.gone for table in chosen.tables), chosen.length))

    def free(self, chosen):
        self.sequences.remove(chosen)
        self.manager.free(chosen)

    def leave(self, chosen):
        self.manager.release_left([chosen])
        for table in chosen.tables:
            if table.rule is not None:
                table.release_before(max(table.length - table.rule.window, 0))

    def hold(self, chosen):
        copies = [[BlockCopy(block, 0) for block in table.blocks] for table in chosen.tables]
        self.holders.append(self.manager.hold(copies))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rules", [(None,), (None, StreamRule(8, 1))], ids=["all kept", "some forget"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_blocks_and_tokens_are_those_that_a_plain_count_finds(groups, rules, seed):
    pool, most = pool_of(groups), 0
    doing = Doing(pool, seed, rules)
    for _ in range(150):
        doing.something()
        found = read_pool(pool)
        assert [group.tokens for group in found.groups] == tokens_by_group(pool.manager)
        assert [group.used for group in found.groups] == used_by_group(pool)
        assert sum(group.used for group in found.groups) == pool.blocks.num_used == found.blocks.used
        most = max(most, found.blocks.shared)
    assert most > 0  # sharing was part of it


def test_an_empty_pool_has_empty_groups():
    found = read_pool(pool_of(GROUPS["a window"], None))  # its size is not known yet
    assert [(group.used, group.cached, group.tokens) for group in found.groups] == [(0, 0, 0)] * 2
    assert found.unfilled_slots == found.live_bytes == 0


def test_pools_are_known_while_they_live_but_for_those_on_trial():
    before = set(live_pools.live_pools())
    pool = pool_of()
    with live_pools.on_trial():
        tried = pool_of()
    assert set(live_pools.live_pools()) - before == {pool}
    assert tried.counts.prefixes is tried.prefixes.index.counts
    del pool
    gc.collect()
    assert set(live_pools.live_pools()) <= before


def test_the_first_model_gives_a_pool_its_name():
    class Model:
        pass

    pool, first, second = pool_of(), Model(), Model()
    assert pool.counts.model_name == ""
    pool.add_model(first, "one")
    pool.add_model(second, "two")
    assert pool.counts.model_name == "one"
    assert set(pool.user_models()) == {first, second}


def test_what_a_pool_has_counted_outlives_it():
    def counted():
        found = live_pools.pool_counts().get("outlived")
        return (found.prefixes.queries, found.prefixes.evictions, dict(found.dense_calls)) if found else None

    for number in (1, 2):
        pool = pool_of()
        pool.counts.model_name = "outlived"
        pool.prefixes.index.counts.queries += 5
        pool.prefixes.index.counts.evictions += 2
        pool.counts.count_dense_call("why")
        assert counted() == (5 * number, 2 * number, {"why": number})
        del pool
        gc.collect()
        assert counted() == (5 * number, 2 * number, {"why": number})


def test_owners_that_come_and_go_leave_one_sum_for_each_model_and_nothing_else():
    class Owner:
        pass

    kept = Outliving(PoolCounts)
    for number in range(1000):
        owner, counts = Owner(), PoolCounts(model_name="ab"[number % 2])
        kept.keep(owner, counts)
        counts.prefixes.queries += 1
    del owner
    assert {name: counts.prefixes.queries for name, counts in kept.sums().items()} == {"a": 500, "b": 500}
    assert len(kept._kept) == len(kept._left) == 0


def test_a_sum_never_misses_an_owner_that_is_just_going():
    class Owner:
        pass

    kept, going = Outliving(PoolCounts), True
    made = 0

    def come_and_go():
        nonlocal made
        while going:
            owner, counts = Owner(), PoolCounts(model_name="a")
            counts.prefixes.queries += 1
            kept.keep(owner, counts)
            made += 1
            del owner

    thread = threading.Thread(target=come_and_go)
    thread.start()
    last = 0
    for _ in range(300):
        now = sum(counts.prefixes.queries for counts in kept.sums().values())
        assert now >= last
        last = now
    going = False
    thread.join()
    assert kept.sums()["a"].prefixes.queries == made


def test_tallies_of_batchers_that_are_gone_stay_in_the_sum_of_their_model():
    name = "hfpaged_requests_received_total"

    def received():
        return registry.tallies()["LlamaForCausalLM"].sums.numbers[name,]

    batcher = StubBatcher(num_blocks=20, block_size=4)
    before = received()
    batcher.generate([[5, 6, 7], [8, 9]], max_new_tokens=3)
    assert received() == before + 2
    live = set(registry.live_batchers())
    del batcher
    gc.collect()
    assert len(set(registry.live_batchers()) - live) == 0
    assert received() == before + 2
