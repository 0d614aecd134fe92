"""A step as numbers: what is read back is what was written, and whoever follows computes the very same."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfpaged
from hfpaged import ContinuousBatcher
from hfpaged.block_pool import BlockPool
from hfpaged.block_table import BlockCopy
from hfpaged.cache_pool import PoolSpec
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.errors import PackedForwardError
from hfpaged.packed_cache import PackedCache
from hfpaged.packed_plan import NOTHING, GroupPlan, PackedInput, PackedPlan

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
small = st.integers(0, 2**31 - 1)


def ints(size, numbers=small):
    return st.lists(numbers, min_size=size, max_size=size).map(lambda rows: np.array(rows, dtype=np.int64))


@st.composite
def group_plans(draw, num_seqs, num_tokens):
    held = draw(ints(num_seqs, st.integers(1, 5)))
    copies = draw(st.integers(0, 3).flatmap(lambda n: ints(4 * n, st.integers(-1, 99))))
    blocks = draw(ints(int(held.sum()))).astype(np.int32)
    if not draw(st.booleans()):
        return GroupPlan(held * BLOCK, held, blocks, copies.reshape(-1, 4))
    reopened, filled, whole = (draw(st.integers(0, 2)) for _ in range(3))
    filling = tuple(draw(ints(n)) for n in (2 * reopened, num_tokens, filled, filled * BLOCK, whole, whole * BLOCK))
    residuals = draw(ints(num_seqs, st.integers(-1, 9)))
    return GroupPlan(held * BLOCK, held, blocks, copies.reshape(-1, 4), residuals, filling)


@st.composite
def plans(draw):
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tokens, num_seqs = sum(counts), len(counts)
    wanted = draw(st.lists(st.integers(0, tokens - 1), unique=True)) if draw(st.booleans()) else []
    given_ = PackedInput(
        draw(ints(tokens)), draw(ints(num_seqs)), np.array(counts, np.int64), np.array(wanted, np.int64)
    )
    groups = draw(st.lists(group_plans(num_seqs, tokens), max_size=3))
    return PackedPlan(given_, tuple(groups), draw(small), draw(small), draw(small))


def told(part):
    """Of a plan, all that it says, in plain numbers."""
    if isinstance(part, np.ndarray):
        return part.reshape(-1).tolist()
    if isinstance(part, tuple):
        return [told(each) for each in part]
    return told(tuple(vars(part).values())) if hasattr(part, "__dataclass_fields__") else part


@settings(max_examples=150, deadline=None)
@given(plans())
def test_what_is_read_back_is_what_was_written(plan):
    numbers = plan.numbers()
    assert numbers.dtype == np.int64
    assert numbers.ndim == 1
    assert told(PackedPlan.of(numbers)) == told(plan)


@settings(max_examples=50, deadline=None)
@given(plans())
def test_positions_go_on_from_the_start_of_each_sequence(plan):
    given_ = plan.given
    expected = [s + i for s, n in zip(given_.starts.tolist(), given_.counts.tolist(), strict=True) for i in range(n)]
    assert given_.positions.tolist() == expected


def test_tables_and_copies_are_those_of_the_leading_process():
    group = GroupPlan(
        np.array([5, 8]),
        np.array([2, 3]),
        np.array([7, 9, 1, 2, 3], np.int32),
        np.array([[1, 2, -1, -1], [3, 4, 5, 6]]),
    )
    first, second = group.tables(BlockPool(10), BLOCK)
    assert (first.blocks.tolist(), first.length, first.last_slot()) == ([7, 9], 5, 9 * BLOCK)
    assert (second.blocks.tolist(), second.length) == ([1, 2, 3], 8)
    assert group.copies_on_write == [BlockCopy(1, 2), BlockCopy(3, 4, (5, 6))]
    assert GroupPlan(NOTHING, NOTHING, np.empty(0, np.int32)).copies_on_write == []


class Follower:
    """Another runner of the same model with a pool of its own, that takes part in each forward of a batcher."""

    def __init__(self, batcher):
        pool, leader = batcher.pool, batcher._parts.runner
        spec = PoolSpec(pool.block_size, None, pool.num_blocks, pool.kv_format.title, None)
        self.runner = ModelRunner(batcher.model, PackedCache(batcher.model, None, spec))
        self.logits, self.expected, self.forwards = [], [], 0
        self._keep(leader, self.expected)
        self._keep(self.runner, self.logits)
        leader.lead = self.lead

    def _keep(self, runner, kept):
        inner = runner._logits

        def logits(given_):
            found = inner(given_)
            kept.append(found.clone())
            return found

        runner._logits = logits

    @contextmanager
    def lead(self, plan):
        self.forwards += 1
        with suppress(PackedForwardError):
            self.runner.follow(PackedPlan.of(plan.numbers()))
        yield

    def check(self):
        assert self.forwards
        assert len(self.logits) == len(self.expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(self.logits, self.expected, strict=True))
        self.runner.cache.pool.check_integrity()


def prompts(*lengths):
    return [[3 + (7 * row + 5 * i) % 90 for i in range(length)] for row, length in enumerate(lengths)]


CASES = {
    "greedy": ("llama", {}, {}),
    "in chunks": ("llama", {"max_num_batched_tokens": 9}, {}),
    "beams copy on write": ("llama", {"block_size": 4}, {"num_beams": 3}),
    "samples": ("llama", {}, {"n": 3, "do_sample": True, "seed": 1}),
    "windows": ("gemma2", {"block_size": 4}, {}),
    "preempted": ("llama", {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32}, {}),
    "int8": ("llama", {"kv_dtype": "int8"}, {}),
    "residuals": ("llama", {"kv_dtype": "int4", "block_size": 16}, {"num_beams": 2}),
    "one by one": ("gpt2", {}, {}),
    "prompt lookup": ("llama", {}, {"prompt_lookup_num_tokens": 3}),
    "logits of prompts": ("llama", {}, {"prompt_logprobs": 2, "logprobs": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_whoever_follows_computes_the_very_same(case):
    name, sizes, asked = CASES[case]
    model = tiny_models.shared(name)
    if sizes.get("kv_dtype") == "int4":
        model = tiny_models.shared("llama_mha")
    sizes = {"num_blocks": 200, "prepack": False, "max_num_batched_tokens": 64, "max_num_seqs": 9} | sizes
    with ContinuousBatcher(model, **sizes) as batcher:
        follower = Follower(batcher)
        shared = prompts(33)[0]
        asked = {"max_new_tokens": 12, "ignore_eos": True} | asked
        for outputs in (batcher.generate([shared, *prompts(4, 21, 40)], **asked), batcher.generate([shared], **asked)):
            assert all(output.error is None for output in outputs)
        follower.check()
    hfpaged.unpatch(model)
