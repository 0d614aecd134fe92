"""Tiers below a pool: what is evicted comes back as it was, or not at all, whatever happens in between."""

from __future__ import annotations

import contextlib
import sys
from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from swapped_texts import FakeTier, SwappedTexts

from hfpaged import InvalidConfigError, KVPool
from hfpaged.block_rows import BlockRows
from hfpaged.errors import OutOfBlocksError, WindowPassedError
from hfpaged.kv_format import FORMATS
from hfpaged.layer_groups import LayerGroup
from hfpaged.live_pools import PoolCounts
from hfpaged.telemetry.pool_readings import read_pool_counts, read_pools
from hfpaged.telemetry.readings import Readings

pytestmark = pytest.mark.usefixtures("one_thread")


make = BlockRows.make


def refuse():
    raise RuntimeError("no memory")


def text(length, seed=0):
    return [1000 * seed + position for position in range(length)]


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (None, 3, 9)], ids=str)
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_what_was_evicted_comes_back(windows, debug):
    texts = SwappedTexts(6 * len(windows), 100, windows, debug)
    assert texts.run(text(22)) == 0
    assert texts.run(text(22, seed=1)) == 0  # takes the place of the first one
    assert texts.run(text(22)) == 20
    texts.check()
    assert texts.counts.blocks_in > 0
    assert texts.counts.tokens_in >= 16
    assert texts.run(text(22, seed=1)) == 20
    texts.check()


def test_a_block_that_came_back_is_not_copied_again_when_it_is_evicted():
    texts = SwappedTexts(6, 100)
    for _ in range(3):
        for seed in (1, 2):
            texts.run(text(22, seed))
    assert texts.counts.blocks_out == 2 * 5
    assert texts.counts.blocks_kept > 0
    texts.check()


def test_under_another_salt_nothing_comes_back():
    texts = SwappedTexts(6, 100)
    texts.run(text(22), "a")
    texts.run(text(22, 1), "a")
    assert texts.run(text(22), "b") == 0
    assert texts.counts.blocks_in == 0
    assert texts.run(text(22), "a") == 20
    texts.check()


def test_host_memory_is_bounded_and_what_was_used_last_stays():
    texts = SwappedTexts(6, 8)
    for seed in (1, 2, 3):
        texts.run(text(22, seed))
    host = texts.pool.swapping.host
    assert (host.num_places, host.num_blocks) == (8, 8)
    assert texts.counts.blocks_dropped == 2
    assert texts.run(text(22, 2)) == 20
    assert texts.run(text(22, 1)) < 20  # its end went first
    texts.check()


def test_what_leaves_host_memory_goes_to_the_tier_below_and_comes_back_from_there():
    texts, tier = SwappedTexts(6, 5), FakeTier()
    texts.pool.add_tier(tier)
    for seed in (1, 2, 3):
        texts.run(text(22, seed))
    assert len(tier.rows) == 5
    assert texts.run(text(22, 1)) == 20
    assert tier.calls.count("read") == 5
    texts.check()


def test_without_host_memory_the_tier_below_gets_all():
    texts, tier = SwappedTexts(6, 0), FakeTier()
    texts.pool.add_tier(tier)
    assert texts.run(text(22)) == 0
    assert texts.run(text(22, 1)) == 0
    assert len(tier.rows) == 5
    assert texts.run(text(22)) == 20
    texts.check()
    with pytest.raises(InvalidConfigError, match="at most one"):
        texts.pool.add_tier(FakeTier())


@pytest.mark.parametrize("places", [0, 3, 100])
@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
def test_each_evicted_block_is_counted_once_and_as_lost_only_where_it_is(places, windows):
    texts = SwappedTexts(6 * len(windows), places, windows)
    texts.pool.add_tier(FakeTier())
    for seed in (0, 1, 0, 1, 2, 0):
        texts.run(text(22, seed))
    counts, host = texts.counts, texts.pool.swapping.host
    lost_below = counts.blocks_out - host.num_blocks if host else 0  # which the lower tier took
    assert counts.blocks_out + counts.blocks_kept + counts.blocks_dropped - lost_below == (
        texts.pool.prefixes.index.counts.evictions
    )
    assert (counts.blocks_dropped == 0 and counts.blocks_kept > 0) or places == 3
    texts.check()


def test_another_pool_finds_what_the_tier_below_holds():
    tier = FakeTier()
    first, second = SwappedTexts(6, 0), SwappedTexts(20, 0)
    first.pool.add_tier(tier)
    second.pool.add_tier(tier)
    first.run(text(22))
    first.run(text(22, 1))
    assert second.run(text(30)) == 20
    second.check()


def test_where_host_memory_is_not_to_be_had_no_prompt_fails_and_files_are_read(monkeypatch):
    tier = FakeTier()
    first, second = SwappedTexts(6, 0), SwappedTexts(20, 100)
    for texts in (first, second):
        texts.pool.add_tier(tier)
    first.run(text(22))
    first.run(text(22, 1))
    monkeypatch.setattr(BlockRows, "make", lambda rows, count: refuse() if count == 100 else make(rows, count))
    assert second.run(text(22)) == 0  # when it is found out
    assert second.run(text(30)[:21]) == 20
    assert second.run(text(22)) == 20
    second.check()
    with pytest.raises(InvalidConfigError, match="are not to be had"):
        SwappedTexts(20, 100).pool.reserve_all()


def test_what_cannot_be_read_is_computed():
    texts, tier = SwappedTexts(6, 0), FakeTier()
    texts.pool.add_tier(tier)
    texts.run(text(22))
    texts.run(text(22, 1))
    tier.damaged = True
    assert texts.run(text(22)) == 0
    texts.check()


def test_nothing_comes_back_where_computing_is_cheaper_but_now_and_then_to_measure():
    texts = SwappedTexts(6, 100)
    costs = texts.pool.swapping.costs
    texts.run(text(22))
    texts.run(text(22, 1))
    costs.told_copy("host", 100, 10.0)
    costs.told_prompt(100, 1e-9)
    found = [texts.run(text(22, number % 2)) for number in range(32)]
    assert found == [0] * 31 + [20]
    assert (texts.counts.declined, texts.counts.tokens_in) == (32, 20)
    for _ in range(9):
        costs.told_prompt(100, 1000.0)
    assert texts.run(text(22)) == 20
    texts.check()


def test_a_restore_takes_no_block_that_anybody_holds_nor_what_the_prompt_begins_with():
    texts = SwappedTexts(8, 100)
    texts.run(text(26))
    held, _ = texts.start(text(18, 1))  # 5 of 8 blocks; of the first text the end is gone
    assert texts.pool.num_free == 3
    with pytest.raises(OutOfBlocksError):
        texts.start(text(26))  # 7 blocks
    sequence, known = texts.start(text(26)[:10])
    assert known == 9  # the last one of them inside of a block
    texts.check(held, sequence)
    assert texts.counts.short >= 1


def test_forgotten_prefixes_are_forgotten_below_too():
    texts = SwappedTexts(6, 100)
    texts.run(text(22))
    texts.run(text(22, 1))
    assert texts.pool.drop_prefixes() == 5 + 5
    assert texts.run(text(22)) == texts.run(text(22, 1)) == 0
    assert texts.counts.blocks_in == 0
    texts.check()


def test_a_pool_with_new_layers_begins_anew_below():
    texts = SwappedTexts(6, 100)
    texts.run(text(22))
    texts.run(text(22, 1))
    import torch

    like = torch.zeros(1, 1, 0, 1, dtype=torch.float64)
    texts.pool.settle_size(0, texts.pool.storage.store(0, like, like, 0))
    assert texts.run(text(22)) == 0
    assert texts.pool.swapping.host.num_blocks <= 6
    texts.check()


def test_a_few_keys_of_another_kind_do_no_harm_to_what_is_evicted():
    texts = SwappedTexts(6, 100)
    texts.run(text(6))
    import torch

    like = torch.zeros(1, 1, 0, 1, dtype=torch.float64)
    other = texts.pool.storage.store(0, like, like, 0)
    texts.pool.settle_size(0, other)
    for room in (0, 2):  # less than the others have, whose blocks are evicted now
        other.reserve(room, 6)
        texts.run(text(22, 1 + room))
        texts.run(text(22, 2 + room))
        assert texts.run(text(22, 1 + room)) == 20
    texts.check()
    assert not texts.pool.swapping.has_failed


def test_a_block_that_is_evicted_twice_in_one_change_lies_below_once():
    texts = SwappedTexts(6, 100, max_cached=0)
    first, _ = texts.start(text(4))
    with texts.pool.changing() as manager:
        manager.free(first)
        again = manager.create()
        manager.grow([(again, 4)])
        (block,) = again.tables[0].blocks
        texts.pool.prefixes.index.publish(texts.roots[first], array("q", text(4)), [block])
        texts.pool.blocks.publish(block)
        manager.free(again)
    del texts.texts[first]
    assert texts.pool.swapping.host.num_blocks == 1
    assert texts.run(text(6)) == 4
    texts.check()


GROUP = (LayerGroup(None, (0,)),)


@pytest.mark.parametrize(
    ("swap_space", "said"),
    [("4 gibs", "swap_space='4 gibs' is no size"), ("900TiB", "900.0 TiB of host memory"), (-1, "-1 bytes")],
)
def test_what_cannot_be_had_is_refused_at_once(swap_space, said):
    with pytest.raises(InvalidConfigError, match=said):
        KVPool(GROUP, block_size=4, kv_format=FORMATS["auto"], num_blocks=4, swap_space=swap_space)


def test_less_than_a_block_is_refused_as_soon_as_its_size_is_known():
    with pytest.raises(InvalidConfigError, match="hold no block: one takes 32"):
        SwappedTexts(6, 0.5)


def test_without_it_there_is_nothing():
    pool = KVPool(GROUP, block_size=4, kv_format=FORMATS["auto"], num_blocks=4)
    assert pool.swapping is None
    assert not pool.prefixes.index.watchers


def test_metrics_count_what_was_swapped_only_where_something_is():
    texts, without = SwappedTexts(6, 8), KVPool(GROUP, block_size=4, kv_format=FORMATS["auto"], num_blocks=4)
    for seed in (1, 2, 3, 3, 2):
        texts.run(text(22, seed))
    readings = Readings()
    for name, pool in (("with", texts.pool), ("without", without)):
        read_pools(readings, [pool], name)
        read_pool_counts(readings, {name: pool.counts})
    numbers, counts = readings.models["with"].numbers, texts.counts
    assert {key[1]: value for key, value in numbers.items() if key[0] == "hfpaged_kv_swapped_blocks_total"} == {
        "out": counts.blocks_out, "kept": counts.blocks_kept, "in": counts.blocks_in, "dropped": counts.blocks_dropped
    }  # fmt: skip
    assert texts.pool.swapping.host.num_blocks == texts.pool.stats().blocks_swapped == 8
    assert numbers["hfpaged_kv_restored_tokens_total",] == counts.tokens_in == 20
    assert numbers["hfpaged_kv_swapped_bytes_total", "in"] == counts.blocks_in * 32 > 0
    assert numbers["hfpaged_kv_swap_space_blocks", "used"] + numbers["hfpaged_kv_swap_space_blocks", "free"] == 8
    assert not [key for key in readings.models["without"].numbers if "swap" in key[0] or "restore" in key[0]]
    sums = PoolCounts()
    sums.add(texts.pool.counts)
    sums.add(texts.pool.counts)
    assert sums.swaps.blocks_in == 2 * counts.blocks_in
    stats = texts.pool.stats()
    assert (stats.swapped_out, stats.swapped_in, stats.restored_tokens) == (
        counts.blocks_out, counts.blocks_in, counts.tokens_in
    )  # fmt: skip


class Swapping(RuleBasedStateMachine):
    """Texts of a few words in random operations over a small pool with small tiers, some of them broken off."""

    @initialize(
        num_blocks=st.integers(4, 30),
        places=st.sampled_from([0, 1, 3, 8, 100]),
        windows=st.sampled_from([(None,), (None, 6), (5,), (None, 3, 9)]),
        max_cached=st.sampled_from([None, None, 3]),
        debug=st.booleans(),
        lower=st.sampled_from([None, 2, 1000]),
    )
    def make(self, num_blocks, places, windows, max_cached, debug, lower):
        if lower is None:
            places = max(places, 1)
        self.texts = SwappedTexts(max(num_blocks, len(windows)), places, windows, debug, max_cached)
        self.tier = None if lower is None else FakeTier(lower)
        if self.tier is not None:
            self.texts.pool.add_tier(self.tier)

    def some(self, data):
        return data.draw(st.sampled_from(list(self.texts.texts)))

    tokens = st.lists(st.sampled_from([[1], [1, 2], [3] * 4, [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9]]), max_size=6).map(
        lambda words: [token for word in words for token in word]
    )

    @precondition(lambda self: len(self.texts.texts) < 4)
    @rule(tokens=tokens, salt=st.sampled_from("ab"))
    def start(self, tokens, salt):
        with contextlib.suppress(OutOfBlocksError):
            self.texts.start(tokens, salt)

    @rule(tokens=tokens, salt=st.sampled_from("ab"))
    def run(self, tokens, salt):
        with contextlib.suppress(OutOfBlocksError):
            self.texts.run(tokens, salt)

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data(), tokens=tokens)
    def append(self, data, tokens):
        with contextlib.suppress(OutOfBlocksError):
            self.texts.append(self.some(data), tokens)

    @precondition(lambda self: 0 < len(self.texts.texts) < 4)
    @rule(data=st.data())
    def fork(self, data):
        self.texts.fork(self.some(data))

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data())
    def trim(self, data):
        sequence = self.some(data)
        with contextlib.suppress(WindowPassedError):
            self.texts.trim(sequence, data.draw(st.integers(0, sequence.length)))

    @precondition(lambda self: self.texts.texts)
    @rule(data=st.data())
    def free(self, data):
        self.texts.free(self.some(data))

    @rule()
    def forget(self):
        self.texts.pool.drop_prefixes()

    @rule(pays=st.booleans())
    def measure(self, pays):
        costs = self.texts.pool.swapping.costs
        costs.told_copy("host", 10**6, 1e-6)
        for _ in range(9):
            costs.told_prompt(1000, 1e6 if pays else 1e-12)

    @precondition(lambda self: self.tier is not None)
    @rule(is_damaged=st.booleans())
    def damage(self, is_damaged):
        self.tier.damaged = is_damaged

    @invariant()
    def all_is_as_it_should_be(self):
        if hasattr(self, "texts"):
            self.texts.check()


Swapping.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = Swapping.TestCase


class InterruptAfter:
    """Raises KeyboardInterrupt at the n-th line that is executed in files with these names."""

    FILES = ("/host_tier.py", "/swapping.py", "/restoring.py", "/block_rows.py")

    def __init__(self, lines):
        self.left = lines
        self.has_come = False

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, kind, *rest):
        sys.settrace(None)
        return kind is KeyboardInterrupt and self.has_come

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line" and not self.has_come:
            self.left -= 1
            if self.left < 0:
                self.has_come = True
                raise KeyboardInterrupt
        return self.trace


# Every line takes a minute. The first lines differ, so that each of a loop comes up somewhere.
@pytest.mark.parametrize(
    ("windows", "lower", "first"), [((None,), None, 0), ((None,), 3, 5), ((None, 6), None, 10), ((None, 6), 3, 15)]
)
def test_ctrl_c_at_any_line_of_a_swap_leaves_no_wrong_block_and_loses_none(windows, lower, first):
    lines, done = first, False
    while not done:
        texts = SwappedTexts(6 * len(windows), 7, windows)
        if lower:
            texts.pool.add_tier(FakeTier(lower))
        texts.run(text(22))
        texts.run(text(22, 1))
        with InterruptAfter(lines) as interrupt:
            texts.run(text(22))
        done = not interrupt.has_come
        for sequence in texts.pool.manager.sequences:
            texts.free(sequence)
        texts.texts.clear()
        texts.check()
        assert texts.pool.blocks.num_used == 0, lines
        for seed in (0, 2, 1):
            texts.run(text(22, seed))  # which checks all
        lines += 19
    assert lines > 100
