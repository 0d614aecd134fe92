"""Rows of a format with residuals, in random operations, against contents that are followed token by token."""

from __future__ import annotations

import hfpaged_kernels as kernels
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from simulated import parts_of, through
from test_rows import HEADS, ONE_GROUP, TWO_GROUPS, Driver, RowsMachine

from hfpaged.errors import OutOfBlocksError
from hfpaged.kv_format import FORMATS
from hfpaged.kv_pool import KVPool
from hfpaged.stored_steps import reading_step

DIMS = (4, 6)


class QuantizedDriver(Driver):
    """Its twin holds for each layer and row the keys and values [num_kv_heads, stored tokens, dim] as they are read."""

    def forget(self):
        super().forget()
        self.twin = {}
        self.was_cropped = False  # what a broken step reads back from blocks may be quantized once more

    def new_states(self, batch, length, same_as=None):
        index = torch.arange(batch) if same_as is None else torch.tensor(same_as)
        return {layer: tuple(torch.randn(batch, HEADS, length, dim)[index] for dim in DIMS) for layer in self.layers}

    def make_copies(self, layer, store):
        store.reserve(self.pool.blocks.high_water, self.pool.num_blocks, self.pool.residuals.high_water)
        super().make_copies(layer, store)

    def remember(self, states, kept):
        past = self.kept if self.length else None  # rows cropped to nothing may come again in another number
        super().remember(states, kept)
        new = self.kept if past is None else self.kept[:, past.shape[1] :]
        size, parts = self.pool.block_size, parts_of(self.pool.kv_format.name, 0)
        for layer, pair in states.items():
            old = self.twin.get(layer) if past is not None else None
            old = old or [tuple(t[row][:, :0] for t in pair) for row in range(len(new))]
            self.twin[layer] = [
                tuple(
                    quantized(torch.cat([part, t[row][:, new[row]]], dim=1), part.shape[1], code, size)
                    for part, t, code in zip(held, pair, parts, strict=True)
                )
                for row, held in enumerate(old)
            ]
        self.was_cropped = False

    def select(self, indices):
        super().select(indices)
        self.twin = {layer: [rows[index] for index in indices] for layer, rows in self.twin.items()}

    def truncate(self, length):
        super().truncate(length)
        counts = self.kept.sum(dim=1).tolist()
        self.twin = {
            layer: [tuple(t[:, :count] for t in pair) for pair, count in zip(rows, counts, strict=True)]
            for layer, rows in self.twin.items()
        }
        self.was_cropped = True

    def fork(self):
        child = QuantizedDriver(self.pool, self.rows.fork())
        child.dense, child.kept, child.twin = dict(self.dense), self.kept, dict(self.twin)
        child.was_cropped = self.was_cropped
        return child

    def check(self):
        self.pool.check_integrity()
        assert self.rows.length == self.length
        for layer, rows in self.twin.items() if self.length else ():
            group, place = self.home[layer]
            store = self.pool.storage.store(place, *(torch.zeros(1, HEADS, 1, dim) for dim in DIMS), layer=0)
            step = reading_step(self.rows, group)
            for number, cache in enumerate((store.key, store.value)):
                packed = kernels.gather(cache, step.block_tables, step.context_lengths, step.residuals)
                for row, pair in enumerate(rows):
                    held, stored = int(step.context_lengths[row]), pair[number].shape[1]
                    window = self.pool.groups[group].window or stored + 1
                    assert min(stored, window - 1) <= held <= stored
                    expected = pair[number][:, stored - held :]
                    torch.testing.assert_close(packed[row, :, :held], expected, atol=1e-6, rtol=1e-6)


def quantized(states, past, code, size):
    """What is read of [num_kv_heads, length, dim], of which `past` tokens were stored before."""
    states = states.clone()
    for end in range(size, states.shape[1] + 1, size):
        if end > past:
            states[:, end - size : end] = through(states[None, :, end - size : end], code)[0]
    return states


def test_rows_cropped_to_nothing_come_again_in_another_number():
    driver = QuantizedDriver(KVPool(ONE_GROUP, block_size=2, kv_format=FORMATS["k8v4"], num_blocks=20))
    driver.step(2, 3)
    driver.truncate(0)
    driver.step(4, 3)
    driver.check()
    driver.select([3, 0, 2])
    driver.truncate(2)
    driver.check()


def test_what_a_step_reopened_outlives_a_later_forward_that_fails_before_its_first_key():
    driver = QuantizedDriver(KVPool(ONE_GROUP, block_size=4, kv_format=FORMATS["k8v4"], num_blocks=20))
    driver.step(1, 4)
    driver.truncate(1)
    driver.step(1, 1)  # by a model that is not patched: nobody says that it is over
    driver.rows.expect(None)
    driver.rows.rollback()
    driver.check()


class QuantizedRowsMachine(RowsMachine):
    @initialize(
        num_blocks=st.integers(6, 60),
        groups=st.sampled_from([ONE_GROUP, TWO_GROUPS]),
        size=st.sampled_from([1, 2, 4, 8]),
        fmt=st.sampled_from(["k8v4", "int4"]),
        seed=st.integers(0, 2**31),
    )
    def make(self, num_blocks, groups, size, fmt, seed):
        torch.manual_seed(seed)
        self.pool = KVPool(groups, block_size=size, kv_format=FORMATS[fmt], num_blocks=num_blocks)
        self.drivers = [QuantizedDriver(self.pool)]

    @rule(data=st.data(), length=st.integers(1, 5))
    def break_and_roll_back(self, data, length):
        driver = self.some_driver(data)
        if driver.was_cropped:
            return
        batch = self.some_batch(data, driver)
        kept = self.some_padding(data, batch, length)
        num_layers = data.draw(st.integers(1, len(driver.layers) - 1))
        try:
            driver.broken_step(batch, length, num_layers, kept)
        except OutOfBlocksError:
            driver.forget()

    def teardown(self):
        super().teardown()
        if hasattr(self, "pool"):
            assert self.pool.residuals.num_open == 0


TestQuantizedRowsMachine = QuantizedRowsMachine.TestCase
TestQuantizedRowsMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
