from __future__ import annotations

import functools
import sys
import threading

import hfpaged_kernels as kernels
import numpy as np
import pytest
import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hfpaged import compat
from hfpaged.block_table import BlockCopy
from hfpaged.cache import PagedCache
from hfpaged.errors import CacheMismatchError, OutOfBlocksError, WindowPassedError
from hfpaged.kv_format import FORMATS
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import LayerGroup
from hfpaged.layer_step import dense_rows
from hfpaged.rows import Rows
from hfpaged.step import StepPlan
from hfpaged.stored_steps import reading_step, rewriting_step

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 3
ONE_GROUP = (LayerGroup(None, (0, 1)),)
TWO_GROUPS = (LayerGroup(None, (0, 2)), LayerGroup(64, (1,)))
WINDOW = 6
SLIDING = (LayerGroup(None, (0,)), LayerGroup(WINDOW, (1,)), LayerGroup(1, (2,)))


def pool_of(num_blocks=64, groups=TWO_GROUPS, block_size=4):
    return KVPool(groups, block_size=block_size, kv_format=FORMATS["auto"], num_blocks=num_blocks)


class Driver:
    """Rows with real stores, driven as a model's layers drive them, and beside them what torch.cat gives."""

    def __init__(self, pool, rows=None):
        self.pool = pool
        self.rows = rows or Rows(pool)
        self.home = {
            layer: (group, place)
            for group, layers in enumerate(pool.groups)
            for place, layer in enumerate(layers.layers)
        }
        self.forget()

    def forget(self):
        """The dense twin of rows that hold nothing."""
        self.dense = {}  # layer -> keys and values [batch, num_kv_heads, length, dim]
        self.kept = None  # [batch, length], False for padding

    @property
    def layers(self):
        return sorted(self.home)

    @property
    def length(self):
        return 0 if self.kept is None else self.kept.shape[1]

    def new_states(self, batch, length, same_as=None):
        """Random keys and values for each layer; row i has those of row same_as[i]."""
        index = torch.arange(batch) if same_as is None else torch.tensor(same_as)
        return {
            layer: tuple(torch.randn(batch, HEADS, length, dim)[index] for dim in (KEY_DIM, VALUE_DIM))
            for layer in self.layers
        }

    def run_layer(self, layer, states):
        key, value = states[layer]
        group, place = self.home[layer]
        store = self.pool.storage.store(place, key, value, layer=0)
        self.rows.join(layer, key.shape[0], key.shape[2])
        self.make_copies(layer, store)
        flat = (t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]) for t in (key, value))
        store.write(*flat, self.rows.steps[group])

    def make_copies(self, layer, store):
        store.reserve(self.pool.blocks.high_water, self.pool.num_blocks)
        copies = self.rows.copies.of(self.home[layer][0])
        if copies:
            store.copy_blocks(copies)
        self.rows.copies.made(layer)

    def step(self, batch, length, kept=None, same_as=None):
        """One whole forward."""
        states = self.new_states(batch, length, same_as)
        self.plan(batch, kept, same_as)
        for layer in self.layers:
            self.run_layer(layer, states)
        self.remember(states, kept)

    def broken_step(self, batch, length, num_layers, kept=None):
        """A forward that raises behind its first `num_layers` layers, and is rolled back."""
        states = self.new_states(batch, length)
        self.plan(batch, kept)
        for layer in self.layers[:num_layers]:
            self.run_layer(layer, states)
        for layer in list(self.rows.copies.unmade_in):
            self.make_copies(layer, self.pool.storage.store(self.home[layer][1], *states[layer], layer=0))
        self.rows.rollback()

    def plan(self, batch, kept, same_as=None):
        if kept is not None or same_as is not None:
            kept = None if kept is None else np.array(kept, dtype=bool)
            self.rows.expect(StepPlan(kept, same_as or list(range(batch))))

    def remember(self, states, kept):
        batch, length = states[0][0].shape[0], states[0][0].shape[2]
        new = torch.ones(batch, length, dtype=torch.bool) if kept is None else torch.tensor(kept).bool()
        if not self.length:
            self.dense, self.kept = states, new
            return
        self.kept = torch.cat([self.kept, new], dim=1)
        self.dense = {
            layer: tuple(torch.cat(pair, dim=2) for pair in zip(old, states[layer], strict=True))
            for layer, old in self.dense.items()
        }

    def select(self, indices):
        self.rows.select(indices)
        self.dense = {layer: tuple(t[indices] for t in pair) for layer, pair in self.dense.items()}
        self.kept = None if self.kept is None else self.kept[indices]

    def truncate(self, length):
        self.rows.truncate(length)
        self.dense = {layer: tuple(t[:, :, :length] for t in pair) for layer, pair in self.dense.items()}
        self.kept = None if self.kept is None else self.kept[:, :length]

    def fork(self):
        child = Driver(self.pool, self.rows.fork())
        child.dense, child.kept = dict(self.dense), self.kept
        return child

    def free(self):
        self.rows.free()
        self.forget()

    def windowed_tables(self):
        """(row, window, its table) of every row in every layer group with a window."""
        for group, layers in enumerate(self.pool.groups):
            if layers.window is not None:
                for row, sequence in enumerate(self.rows.sequences):
                    yield row, layers.window, sequence.tables[group]

    def check_released(self, length=None):
        """No block is held that the token behind the first `length` positions does not see."""
        for row, window, table in self.windowed_tables():
            stored = int(self.kept[row, :length].sum())
            assert table.first == max(stored - window + 1, 0) // self.pool.block_size

    def check(self):
        """The blocks hold exactly what the dense twin holds, row by row, padding left out, and the last of it where
        a window has left the rest behind; as a dense view too.
        """
        self.pool.check_integrity()
        assert self.rows.length == self.length
        if not self.length:
            assert all(sequence.length == 0 for sequence in self.rows.sequences)
            return
        assert self.rows.batch == len(self.kept)
        assert [sequence.length for sequence in self.rows.sequences] == self.kept.sum(dim=1).tolist()
        if self.rows.kept is None:
            assert self.kept.all()
        else:
            assert self.rows.kept.tolist() == self.kept.tolist()
        for layer, pair in self.dense.items():
            assert self.rows.length_of(layer) == self.length
            group, place = self.home[layer]
            store = self.pool.storage.store(place, *pair, layer=0)
            step = reading_step(self.rows, group)
            for cache, dense in zip((store.key, store.value), pair, strict=True):
                packed = kernels.gather(cache, step.block_tables, step.context_lengths)
                for row, kept in enumerate(self.kept):
                    held, stored = int(step.context_lengths[row]), int(kept.sum())
                    window = self.pool.groups[group].window or stored + 1
                    assert min(stored, window - 1) <= held <= stored
                    expected = dense[row][:, kept][:, stored - held :]
                    assert torch.equal(packed[row, :, :held], expected), (layer, row)
                offset = max(self.length - (self.pool.groups[group].window or self.length + 1) + 1, 0)
                view = dense_rows(self.rows, step, cache, offset, self.length)
                assert torch.equal(view, (dense * self.kept[:, None, :, None])[:, :, offset:])


def driver_of(*args, **kwargs):
    return Driver(pool_of(*args, **kwargs))


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).eval()


PADDING = {
    "none": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "inside": [[1, 0, 1, 0, 1], [1, 1, 0, 1, 1]],
    "both ends": [[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]],
    "a whole row": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "everything": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("kept", PADDING.values(), ids=PADDING)
def test_padding_is_not_stored_and_rows_go_on_behind_it(kept):
    driver = driver_of()
    driver.step(2, 5, kept)
    driver.check()
    tokens = [sum(row) for row in kept]
    assert driver.pool.blocks.num_used == 2 * sum(-(-count // 4) for count in tokens)
    for _ in range(4):
        driver.step(2, 1)
        driver.check()
    assert [sequence.length for sequence in driver.rows.sequences] == [count + 4 for count in tokens]
    assert driver.rows.kept.shape == (2, 9)


def test_padding_may_come_after_rows_without_any():
    driver = driver_of()
    driver.step(2, 3)
    assert driver.rows.kept is None
    driver.step(2, 2, [[1, 1], [1, 0]])
    driver.check()
    assert driver.rows.kept.tolist() == [[True] * 5, [True] * 4 + [False]]


def test_rows_without_padding_keep_no_record_of_it():
    driver = driver_of()
    driver.step(2, 3)
    driver.step(2, 1)
    assert driver.rows.kept is None
    driver.check()


@pytest.mark.parametrize("width", [3, 4, 5, 7, 8, 9])
def test_tokens_are_found_again_at_block_boundaries(width):
    driver = driver_of()
    driver.step(2, width)
    driver.check()
    driver.step(2, 1)
    driver.check()
    driver.step(2, 3)
    driver.check()


def test_every_layer_sees_each_step_and_the_groups_have_steps_of_their_own():
    driver = driver_of()
    driver.step(1, 5)
    assert [driver.rows.length_of(layer) for layer in (0, 1, 2, 3)] == [5, 5, 5, 0]
    full, sliding = driver.rows.steps
    assert set(full.slots.tolist()).isdisjoint(sliding.slots.tolist())


def test_a_plan_is_for_one_step_only():
    driver = driver_of()
    driver.step(2, 2, [[0, 1], [1, 1]])
    assert driver.rows.plan is None
    driver.step(2, 2)
    assert driver.rows.kept.tolist() == [[False, True, True, True], [True] * 4]
    driver.check()


def test_a_plan_for_another_shape_is_not_followed():
    driver = driver_of()
    driver.rows.expect(StepPlan(np.array([[False, True, True]]), [0]))
    states = driver.new_states(2, 3)
    for layer in driver.layers:
        driver.run_layer(layer, states)
    driver.remember(states, None)
    driver.check()


def test_equal_rows_are_stored_once():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(4, 10, same_as=[0, 0, 2, 0])
    assert driver.pool.stats().blocks_used == 6
    assert driver.pool.stats().blocks_shared == 3
    slots = driver.rows.steps[0].slots.view(4, 10)
    assert (slots[[1, 3]] == -1).all()
    assert (slots[[0, 2]] >= 0).all()
    driver.check()


def test_equal_rows_part_by_copying_their_last_block_once_less_than_they_are():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(4, 10, same_as=[0, 0, 0, 0])
    last = driver.rows.sequences[0].tables[0].blocks[-1]
    driver.step(4, 1)
    assert [copy.source for copy in driver.rows.copies.of(0)] == [last] * 3
    assert driver.pool.stats().blocks_used == 2 + 4
    driver.check()


def test_equal_rows_of_whole_blocks_part_without_copies():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(3, 8, same_as=[0, 0, 0])
    driver.step(3, 1)
    assert driver.rows.copies.by_group == [[]]
    assert driver.pool.stats().blocks_used == 2 + 3
    driver.check()


def test_equal_rows_with_equal_padding_are_stored_once_too():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(3, 6, [[0, 0, 1, 1, 1, 1]] * 2 + [[1] * 6], same_as=[0, 0, 2])
    assert driver.pool.stats().blocks_used == 1 + 2
    driver.check()
    driver.step(3, 1)
    driver.check()


def test_rows_that_hold_tokens_already_are_never_taken_for_equal():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(2, 3)
    states = driver.new_states(2, 2)
    driver.rows.expect(StepPlan(None, [0, 0]))
    for layer in driver.layers:
        driver.run_layer(layer, states)
    driver.remember(states, None)
    driver.check()


@pytest.mark.parametrize("count", [1, 4, 6])
def test_the_last_positions_can_be_written_anew_where_they_lie(count):
    driver = driver_of()
    driver.step(2, 6, [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1]])
    for group in range(2):
        written = driver.rows.steps[group].slots.view(2, 6)
        step = rewriting_step(driver.rows, group, count)
        assert step.slots.tolist() == written[:, 6 - count :].flatten().tolist()
        assert step.context_lengths.tolist() == [4, 5]
    driver.check()


def test_blocks_that_others_hold_are_not_written_anew():
    driver = driver_of()
    driver.step(1, 6)
    child = driver.fork()
    for rows in (driver.rows, child.rows):
        with pytest.raises(CacheMismatchError, match="share blocks with this one"):
            rewriting_step(rows, 0, 6)
    child.free()
    assert rewriting_step(driver.rows, 0, 6).query_lengths.tolist() == [6]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("kept", [None, [[1, 0], [1, 1]]])
def test_rollback_undoes_a_step_at_whichever_layer_it_broke(num_layers, kept):
    driver = driver_of()
    driver.step(2, 7, [[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    used = driver.pool.blocks.num_used
    driver.broken_step(2, 2, num_layers, kept)
    driver.check()
    assert driver.pool.blocks.num_used == used
    driver.step(2, 2)
    driver.check()


def test_rollback_of_a_step_that_copied_leaves_each_row_its_tokens():
    driver = driver_of()
    driver.step(3, 6, same_as=[0, 0, 0])
    driver.broken_step(3, 1, num_layers=1)
    driver.check()
    driver.step(3, 1)
    driver.check()


def test_rollback_of_the_first_step_gives_all_blocks_back():
    driver = driver_of()
    driver.broken_step(2, 7, num_layers=2)
    driver.check()
    assert driver.pool.blocks.num_used == 0
    driver.step(2, 7)
    driver.check()


def test_rollback_without_a_step_does_nothing():
    driver = driver_of()
    driver.rows.rollback()
    driver.step(2, 5)
    driver.select([1, 0])
    driver.rows.rollback()
    driver.check()


def test_rollback_of_the_first_step_lets_another_batch_in():
    driver = driver_of()
    driver.broken_step(2, 7, num_layers=2, kept=[[0] * 3 + [1] * 4, [1] * 7])
    driver.step(1, 7)
    driver.check()


def test_rollback_of_a_forward_that_broke_before_its_first_key_keeps_the_step_before():
    driver = driver_of()
    driver.step(2, 5)
    driver.step(2, 1)
    driver.rows.expect(None)
    driver.rows.rollback()
    driver.check()
    with pytest.raises(CacheMismatchError):
        driver.rows.join(0, 3, 1)
    driver.rows.rollback()
    driver.check()
    driver.step(2, 1)
    driver.check()


def test_a_forward_with_a_bad_token_id_does_not_lose_the_step_before():
    model = tiny_llama()
    cache = PagedCache(model, num_blocks=64)
    named = {compat.cache_argument(): cache}
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), **named)
        model(torch.tensor([[4]]), **named)
        with pytest.raises(IndexError):
            model(torch.tensor([[9999]]), **named)
        assert cache.get_seq_length() == 4
        after = model(torch.tensor([[5]]), **named).logits
        whole = model(torch.tensor([[1, 2, 3, 4, 5]])).logits
    torch.testing.assert_close(after[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)


def test_a_new_forward_ends_the_one_before_though_layers_are_missing():
    driver = driver_of()
    driver.step(2, 5)
    driver.rows.join(0, 2, 1)
    driver.rows.expect(None)
    driver.rows.rollback()
    assert driver.rows.length == 6


@pytest.mark.parametrize("length", range(11))
def test_truncate_keeps_the_first_positions_and_rows_go_on_from_there(length):
    driver = driver_of()
    driver.step(2, 10)
    driver.truncate(length)
    driver.check()
    assert driver.pool.blocks.num_used == 2 * 2 * -(-length // 4)
    driver.step(2, 3)
    driver.check()


@pytest.mark.parametrize("length", range(7))
def test_truncate_counts_positions_with_padding(length):
    driver = driver_of()
    driver.step(2, 6, [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1]])
    driver.truncate(length)
    driver.check()
    driver.step(2, 2, [[0, 1], [1, 1]])
    driver.check()


def test_truncate_beyond_the_end_keeps_all():
    driver = driver_of()
    driver.step(2, 6)
    driver.truncate(100)
    driver.check()
    assert driver.rows.length == 6


def test_truncating_shared_blocks_copies_before_it_overwrites():
    driver = driver_of()
    driver.step(1, 8)
    child = driver.fork()
    child.truncate(6)
    child.step(1, 1)
    assert [len(copies) for copies in child.rows.copies.by_group] == [1, 1]
    driver.check()
    child.check()


def test_rows_cut_to_nothing_take_another_batch_and_may_be_equal():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(2, 6, [[0, 0, 1, 1, 1, 1], [1] * 6])
    driver.truncate(0)
    driver.check()
    driver.step(3, 5, same_as=[0, 0, 0])
    driver.check()
    assert driver.rows.kept is None
    assert driver.pool.blocks.num_used == 2


@pytest.mark.parametrize("indices", [[1, 0, 2], [0, 0, 0], [2, 2, 1, 1, 0, 0], [1], [2, 0], [0, 1, 2], [-1, 0]])
def test_select_makes_row_i_what_row_indices_i_was(indices):
    driver = driver_of()
    driver.step(3, 6, [[0, 1, 1, 1, 1, 1], [1] * 6, [0, 0, 0, 1, 1, 1]])
    driver.select(indices)
    driver.check()
    assert driver.rows.batch == len(indices)
    driver.step(len(indices), 1)
    driver.check()


def test_select_copies_nothing_and_gives_back_what_nobody_selected():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(3, 6)
    blocks = [list(sequence.tables[0].blocks) for sequence in driver.rows.sequences]
    driver.select([2, 2, 0])
    assert [list(s.tables[0].blocks) for s in driver.rows.sequences] == [blocks[2], blocks[2], blocks[0]]
    assert driver.pool.blocks.num_used == 4
    driver.select([2])
    assert driver.pool.blocks.num_used == 2
    driver.check()


@pytest.mark.parametrize("indices", [[0, 9], [9, 0], [0, 1, -3]])
def test_a_select_of_a_row_that_is_not_there_leaks_no_blocks(indices):
    driver = driver_of()
    driver.step(2, 6)
    with pytest.raises(IndexError):
        driver.rows.select(indices)
    driver.check()
    driver.free()
    assert driver.pool.num_free == driver.pool.num_blocks


def test_beams_that_reorder_at_every_step_keep_their_histories():
    driver = driver_of()
    driver.step(4, 5, same_as=[0, 0, 0, 0])
    for indices in ([0, 0, 1, 3], [3, 2, 1, 0], [1, 1, 1, 1], [0, 2, 1, 3], [2, 2, 0, 0]) * 2:
        driver.step(4, 1)
        driver.select(indices)
        driver.check()


def test_a_fork_shares_all_blocks_and_the_two_part_where_they_write():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(2, 6, [[1] * 6, [0, 0, 1, 1, 1, 1]])
    used = driver.pool.blocks.num_used
    child = driver.fork()
    assert driver.pool.blocks.num_used == driver.pool.stats().blocks_shared == used
    last = driver.rows.sequences[0].tables[0].blocks[-1]
    child.step(2, 1)
    assert child.rows.copies.by_group == [[BlockCopy(last, child.rows.sequences[0].tables[0].blocks[-1])]]
    driver.step(2, 1)
    assert driver.rows.copies.by_group == [[]]
    for rows in (driver, child):
        rows.check()
    child.free()
    driver.check()


def test_a_copy_that_layers_have_still_to_make_finds_its_source_untouched():
    driver = driver_of(groups=ONE_GROUP)
    driver.step(1, 6)
    child = driver.fork()
    source = child.rows.sequences[0].tables[0].blocks[1]
    states = driver.new_states(1, 1)
    driver.run_layer(0, states)  # layer 1 has still to copy the block
    child.free()  # in another thread, which goes on with a cache of its own
    other = Driver(driver.pool)
    other.step(1, 4)
    assert source not in other.rows.sequences[0].tables[0].blocks
    driver.run_layer(1, states)
    driver.remember(states, None)
    driver.check()
    other.check()
    assert driver.pool.blocks.refcount(source) == 0


@pytest.mark.parametrize("groups", [ONE_GROUP, TWO_GROUPS], ids=["one group", "two groups"])
def test_sources_of_copies_are_held_until_the_last_layer_of_all_groups_has_copied(groups):
    driver = driver_of(groups=groups)
    driver.step(1, 6)
    child = driver.fork()
    sources = [table.blocks[1] for table in driver.rows.sequences[0].tables]
    states = child.new_states(1, 1)
    counts = []
    for layer in child.layers:
        child.run_layer(layer, states)
        counts.append([driver.pool.blocks.refcount(source) for source in sources])
    assert counts == [[2] * len(groups)] * (len(child.layers) - 1) + [[1] * len(groups)]
    child.remember(states, None)
    child.check()


@pytest.mark.parametrize("goes_on", ["step", "free"])
def test_sources_of_copies_that_a_layer_never_made_come_back_with_the_next_step_or_when_freed(goes_on):
    driver = driver_of()
    driver.step(1, 6)
    child = driver.fork()
    child.rows.join(0, 1, 1)
    driver.free()
    assert driver.pool.blocks.num_used == 6  # 4 of the child and the 2 sources
    if goes_on == "free":
        child.free()
        assert driver.pool.blocks.num_used == 0
    else:
        child.rows.join(0, 1, 1)
        assert driver.pool.blocks.num_used == 4
    driver.pool.check_integrity()


def test_abandoned_rows_give_back_their_blocks_and_the_sources_of_their_copies():
    driver = driver_of()
    driver.step(1, 6)
    child = driver.fork()
    child.rows.join(0, 1, 1)
    driver.free()
    child.rows.abandon()
    assert driver.pool.num_free == driver.pool.num_blocks
    driver.pool.check_integrity()


def test_a_fork_outlives_its_parent():
    driver = driver_of()
    driver.step(2, 6)
    child = driver.fork()
    driver.free()
    child.check()
    child.step(2, 3)
    child.check()
    child.free()
    assert driver.pool.blocks.num_used == 0


def test_freed_rows_are_empty_and_take_another_batch():
    driver = driver_of()
    driver.step(2, 6, [[1] * 6, [0] * 3 + [1] * 3])
    driver.free()
    assert (driver.rows.batch, driver.rows.length, driver.rows.kept) == (0, 0, None)
    assert driver.pool.blocks.num_used == 0
    assert driver.rows.length_of(0) == 0
    driver.step(3, 5)
    driver.check()


def test_another_batch_is_refused_before_anything_changes():
    driver = driver_of()
    driver.step(2, 6)
    with pytest.raises(CacheMismatchError, match="the cache holds 2 rows and the model brings 3"):
        driver.rows.join(0, 3, 1)
    driver.check()
    driver.step(2, 1)
    driver.check()


@pytest.mark.parametrize(("batch", "length"), [(2, 3), (3, 2), (2, 1)])
def test_a_layer_that_does_not_fit_the_step_is_refused_with_the_numbers(batch, length):
    driver = driver_of()
    driver.rows.join(0, 2, 2)
    with pytest.raises(CacheMismatchError) as caught:
        driver.rows.join(1, batch, length)
    assert f"layer 1 has seen 0 positions and brings {length} for {batch} rows" in str(caught.value)
    assert "from 0 to 2 for 2 rows" in str(caught.value)
    assert driver.rows.length_of(1) == 0
    driver.rows.join(1, 2, 2)
    assert driver.rows.length_of(1) == 2


def test_a_layer_that_missed_a_step_is_refused():
    driver = driver_of()
    driver.step(1, 4)
    driver.rows.join(0, 1, 1)
    driver.rows.join(0, 1, 1)
    with pytest.raises(CacheMismatchError, match=r"layer 1 has seen 4 positions .* goes from 5 to 6 for 1 rows"):
        driver.rows.join(1, 1, 1)


def test_whichever_layer_comes_first_begins_the_step():
    driver = driver_of()
    for order in ([2, 0, 1], [1, 2, 0]):
        states = driver.new_states(2, 3)
        for layer in order:
            driver.run_layer(layer, states)
        driver.remember(states, None)
        driver.check()


@pytest.mark.parametrize("past", [0, 6])
def test_out_of_blocks_gives_all_blocks_of_these_rows_back_and_of_no_others(past):
    other = driver_of(num_blocks=8)
    other.step(1, 4)
    driver = Driver(other.pool)
    if past:
        driver.step(1, past)
    with pytest.raises(OutOfBlocksError, match="of the pool's 8 are free") as caught:
        driver.step(1, 13)
    assert caught.value.free == (6 if past == 0 else 2)
    driver.forget()
    driver.check()
    assert driver.rows.batch == 0
    assert driver.pool.blocks.num_used == 2
    other.check()
    driver.step(1, 12)
    driver.check()
    assert driver.pool.num_free == 0


# Windows

AROUND = [4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17]  # the window of 6, blocks of 4


@pytest.mark.parametrize("length", AROUND)
def test_blocks_that_left_a_window_go_back_when_the_forward_ends_or_else_when_the_next_begins(length):
    driver = driver_of(groups=SLIDING)
    driver.step(2, length)
    whole = -(-length // 4)
    assert driver.pool.blocks.num_used == 2 * 3 * whole  # the step itself read them all
    driver.rows.release_left()
    driver.check_released()
    driver.check()
    assert driver.pool.blocks.num_used == 2 * (whole + whole - max(length - 5, 0) // 4 + whole - length // 4)
    later = driver_of(groups=SLIDING)
    later.step(2, length)
    later.step(2, 3)
    later.check_released(length)
    later.check()


@pytest.mark.parametrize("kept", PADDING.values(), ids=PADDING)
def test_each_row_gives_back_by_the_tokens_that_it_stores(kept):
    driver = driver_of(groups=SLIDING, block_size=2)
    driver.step(2, 5, kept)
    for length in (1, 4, 1, 1, 2):
        driver.step(2, length)
        driver.rows.release_left()
        driver.check_released()
        driver.check()
    firsts = [table.first for _, _, table in driver.windowed_tables()]
    assert min(firsts) > 0


def test_what_a_step_gives_back_serves_its_own_growth():
    driver = driver_of(groups=(LayerGroup(4, (0,)),), num_blocks=2)
    for _ in range(30):
        driver.step(1, 1)
        driver.check()
    assert driver.pool.blocks.high_water == 2


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("length", AROUND)
def test_a_step_that_failed_leaves_what_the_next_token_sees(length, num_layers):
    driver = driver_of(groups=SLIDING)
    driver.step(2, length, [[0] + [1] * (length - 1), [1] * length])
    for broken in (1, 7, 9):
        driver.broken_step(2, broken, num_layers)
        driver.check_released(length)
        driver.check()
    driver.step(2, 2)
    driver.check()


def test_what_may_be_cropped_stays_until_it_was_cropped():
    driver = driver_of(groups=SLIDING)
    driver.rows.records_past = True
    driver.step(1, 15)
    driver.step(1, 1)
    driver.rows.release_left()
    assert driver.pool.blocks.num_used == 3 * 4
    driver.truncate(3)
    driver.check()
    driver.step(1, 13)
    driver.rows.release_left(recorded=True)
    driver.check_released()
    driver.check()


@pytest.mark.parametrize("to", range(17))
def test_a_crop_to_before_what_a_window_still_holds_is_refused_and_changes_nothing(to):
    driver = driver_of(groups=(LayerGroup(None, (0,)), LayerGroup(WINDOW, (1,))))
    driver.step(2, 16, [[1] * 16, [0] * 3 + [1] * 13])
    driver.rows.release_left()  # the first 8 tokens of a row of 16, and of one of 13
    lost = [stored for stored in (to, max(to - 3, 0)) if stored > 0 and max(stored - WINDOW + 1, 0) < 8]
    if lost:
        used = driver.pool.blocks.num_used
        with pytest.raises(WindowPassedError, match=rf"cut to {lost[0]} tokens .* window of 6, and the first 8 left"):
            driver.rows.truncate(to)
        assert driver.pool.blocks.num_used == used
    else:
        driver.truncate(to)
    driver.check()
    driver.step(2, 3)
    driver.check()


def test_forks_and_selected_rows_give_back_for_themselves():
    driver = driver_of(groups=SLIDING)
    driver.step(2, 9)
    child = driver.fork()
    used = driver.pool.blocks.num_used
    child.rows.release_left()
    assert driver.pool.blocks.num_used == used  # the parent holds them still
    driver.check()
    child.check()
    driver.select([1, 1, 0])
    driver.rows.release_left()
    assert driver.pool.blocks.num_used < used
    for each in (driver, child):
        each.step(each.rows.batch, 5)
        each.check()
    child.free()
    driver.check()


def test_a_fork_of_rows_that_record_records():
    driver = driver_of(groups=SLIDING)
    driver.rows.records_past = True
    assert driver.fork().rows.records_past


class RowsMachine(RuleBasedStateMachine):
    """Up to three caches on one pool, in random operations, against dense tensors."""

    @initialize(
        num_blocks=st.integers(6, 60),
        groups=st.sampled_from([ONE_GROUP, TWO_GROUPS, SLIDING, SLIDING]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        seed=st.integers(0, 2**31),
    )
    def make(self, num_blocks, groups, block_size, seed):
        torch.manual_seed(seed)
        self.pool = pool_of(num_blocks, groups, block_size)
        self.drivers = [Driver(self.pool)]

    def some_driver(self, data, with_tokens=False):
        drivers = [d for d in self.drivers if d.length or not with_tokens]
        return drivers[data.draw(st.integers(0, len(drivers) - 1))] if drivers else None

    def some_batch(self, data, driver):
        return driver.rows.batch if driver.length else data.draw(st.integers(1, 4))

    def some_padding(self, data, batch, length):
        kind = data.draw(st.sampled_from(["none", "left", "any"]))
        if kind == "none":
            return None
        if kind == "left":
            return [
                [position >= start for position in range(length)]
                for start in data.draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
            ]
        row = st.lists(st.booleans(), min_size=length, max_size=length)
        return data.draw(st.lists(row, min_size=batch, max_size=batch))

    @rule(data=st.data(), length=st.integers(1, 10))
    def prefill(self, data, length):
        driver = self.some_driver(data)
        batch = self.some_batch(data, driver)
        kept = self.some_padding(data, batch, length)
        same_as = None
        if not driver.length:
            firsts = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
            same_as = [firsts.index(first) for first in firsts]
            kept = None if kept is None else [kept[first] for first in same_as]
        self.step(driver, batch, length, kept, same_as)

    @rule(data=st.data())
    def decode(self, data):
        driver = self.some_driver(data, with_tokens=True)
        if driver:
            self.step(driver, driver.rows.batch, 1)

    def step(self, driver, batch, length, kept=None, same_as=None):
        held = self.blocks_of_others(driver)
        try:
            driver.step(batch, length, kept, same_as)
        except OutOfBlocksError:
            driver.forget()
            assert driver.rows.batch == 0
            assert self.pool.blocks.num_used == len(held)

    def blocks_of_others(self, driver):
        return {
            block
            for other in self.drivers
            if other is not driver
            for sequence in other.rows.sequences
            for table in sequence.tables
            for block in table.blocks
        }

    @rule(data=st.data(), length=st.integers(1, 5))
    def break_and_roll_back(self, data, length):
        driver = self.some_driver(data)
        batch = self.some_batch(data, driver)
        kept = self.some_padding(data, batch, length)
        num_layers = data.draw(st.integers(1, len(driver.layers) - 1))
        try:
            driver.broken_step(batch, length, num_layers, kept)
        except OutOfBlocksError:
            driver.forget()

    @rule(data=st.data())
    def break_before_the_first_key(self, data):
        driver = self.some_driver(data)
        driver.rows.expect(None)
        driver.rows.rollback()

    @rule(data=st.data())
    def select(self, data):
        driver = self.some_driver(data, with_tokens=True)
        if driver:
            row = st.integers(0, driver.rows.batch - 1)
            driver.select(data.draw(st.lists(row, min_size=1, max_size=5)))

    @rule(data=st.data())
    def truncate(self, data):
        driver = self.some_driver(data, with_tokens=True)
        if driver:
            length = data.draw(st.integers(0, driver.length))
            kept = driver.kept[:, :length].sum(dim=1).tolist()
            lost = [
                max(kept[row] - window + 1, 0) < table.first * self.pool.block_size
                for row, window, table in driver.windowed_tables()
                if kept[row]
            ]
            if any(lost):
                with pytest.raises(WindowPassedError):
                    driver.rows.truncate(length)
            else:
                driver.truncate(length)

    @rule(data=st.data(), recorded=st.booleans())
    def end_forward_or_crop_nothing(self, data, recorded):
        driver = self.some_driver(data)
        driver.rows.release_left(recorded=recorded)
        if driver.length and (recorded or not driver.rows.records_past):
            driver.check_released()

    @rule(data=st.data(), records=st.booleans())
    def record(self, data, records):
        self.some_driver(data).rows.records_past = records

    @precondition(lambda self: len(self.drivers) < 3)
    @rule(data=st.data())
    def fork(self, data):
        self.drivers.append(self.some_driver(data).fork())

    @rule(data=st.data())
    def free(self, data):
        self.some_driver(data).free()

    @rule(data=st.data())
    def refuse_another_batch(self, data):
        driver = self.some_driver(data, with_tokens=True)
        if driver:
            with pytest.raises(CacheMismatchError):
                driver.rows.join(0, driver.rows.batch + 1, 1)

    @invariant()
    def blocks_hold_what_dense_tensors_hold(self):
        for driver in self.drivers:
            driver.check()

    def teardown(self):
        for driver in getattr(self, "drivers", []):
            driver.free()
        if hasattr(self, "pool"):
            assert self.pool.blocks.num_used == 0


TestRowsMachine = RowsMachine.TestCase
TestRowsMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_a_cache_may_be_made_while_another_thread_goes_through_all_of_them(request):
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    pool, failed = pool_of(), []
    alive = [Rows(pool) for _ in range(300)]

    def settle():
        try:
            while alive:
                pool.settle_idle()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=settle)
    thread.start()
    for _ in range(5000):
        alive.append(Rows(pool))
        del alive[350:]
    alive.clear()
    thread.join()
    assert not failed
