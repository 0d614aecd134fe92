"""Memory maps: what they say is what the pool and its block tables hold, and what they draw is what they say."""

from __future__ import annotations

import copy
import gc
import json
import sys
import threading
import time
import warnings
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_count import tokens_by_group
from stub_batcher import StubBatcher
from test_batcher_tokens import batcher_of, checked

import hfpaged
from hfpaged import InvalidConfigError, MemoryMap, OutOfBlocksError, PagedCache, RequestTooLongError
from hfpaged.memory_grid import CACHED, FREE, MOST_CELLS, MOST_NAMES, OTHERS, UNUSED, grid_of
from hfpaged.memory_map import SequenceBlocks
from hfpaged.memory_plot import PALETTE

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.past_key_values.")]

PNG = b"\x89PNG\r\n"


def generate(cache, prompts, **arguments):
    """The prompts through a model that is patched for the cache; `prompts` are rows of one length."""
    model = next(iter(cache.pool.models))
    ids = torch.tensor(prompts)
    arguments = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)} | arguments
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, past_key_values=cache, **arguments)


def check(memory, pool):
    """All that two ways of counting must agree on."""
    stats, blocks = pool.stats(), pool.blocks
    held = Counter(block for sequence in memory.sequences for block in sequence.all_blocks)
    assert len(held) == memory.num_used == stats.blocks_used
    assert sum(count > 1 for count in held.values()) == memory.num_shared == stats.blocks_shared
    assert held.total() == sum(memory.refcounts) == memory.num_used + memory.num_saved
    assert list(memory.refcounts) == [blocks.refcount(block) for block in range(blocks.high_water)]
    assert all(memory.refcounts[block] == count for block, count in held.items())
    assert (memory.num_blocks, memory.num_cached) == (stats.blocks_total, stats.blocks_cached)
    assert (memory.num_free, memory.block_bytes) == (stats.blocks_free, pool.storage.block_bytes)
    states = Counter(map(memory.state, range(memory.num_blocks)))
    assert states["used"] + states["shared"] == stats.blocks_used
    assert (states["shared"], states["cached"]) == (stats.blocks_shared, stats.blocks_cached)
    assert states["unused"] == stats.blocks_total - blocks.high_water
    filled = sum(memory.filled[block] for block in held)
    assert filled == sum(tokens_by_group(pool.manager))
    assert all(memory.filled[block] == pool.block_size for block in memory.cached)
    names = [sequence.name for sequence in memory.sequences]
    assert len(names) == len(set(names))
    holding = [each for each in pool.manager.sequences if any(table.blocks for table in each.tables)]
    assert len(names) == len(holding)
    assert sum(each.tokens for each in memory.sequences) == sum(each.length for each in holding)
    check_texts(memory)


def check_texts(memory):
    told = json.loads(json.dumps(memory.to_dict()))
    assert told["blocks"]["used"] == memory.num_used
    assert [each["blocks"] for each in told["sequences"]] == [
        [list(blocks) for blocks in each.blocks] for each in memory.sequences
    ]
    text = str(memory)
    assert f"{memory.num_used} of {memory.num_blocks} blocks used ({memory.num_shared} shared)" in text
    grid = grid_of(memory)
    assert set(grid.cells) <= {*range(len(grid.names)), *OTHERS, CACHED, FREE, UNUSED}


class Mapping(RuleBasedStateMachine):
    """Caches, forks, beams, crops, pins and a batcher on one pool."""

    @initialize(name=st.sampled_from(("llama", "mistral", "gpt_oss")), block_size=st.sampled_from((1, 4)))
    def begin(self, name, block_size):
        self.model = tiny_models.shared(name)
        first = PagedCache(self.model, block_size=block_size, num_blocks=800 // block_size)
        self.pool, self.caches, self.prompts = first.pool, [first], []
        self.batcher = StubBatcher(name, pool=self.pool, max_num_seqs=8, max_num_batched_tokens=24)
        self.names = []

    @rule(
        length=st.integers(1, 20), rows=st.integers(1, 3), beams=st.sampled_from((1, 1, 2)), same=st.booleans(),
        new=st.integers(1, 9),
    )  # fmt: skip
    def run_a_new_cache(self, length, rows, beams, same, new):
        cache = PagedCache(self.model, pool=self.pool)
        self.caches.append(cache)
        prompts = [[3 + (0 if same else row) + i % 5 for i in range(length)] for row in range(rows)]
        self.prompts += prompts
        try:
            generate(cache, prompts, max_new_tokens=new, num_beams=beams)
        except OutOfBlocksError:
            assert cache.get_seq_length() == 0

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), what=st.sampled_from(("fork", "crop", "reset", "repeat", "reorder", "drop")))
    def change_a_cache(self, data, what):
        cache = data.draw(st.sampled_from(self.caches))
        rows, length = cache._rows.batch, cache._rows.length
        if what == "fork":
            self.caches.append(copy.deepcopy(cache))
        elif what == "crop" and length:
            try:
                cache.crop(-data.draw(st.integers(1, length)))
            except hfpaged.WindowPassedError:
                return
        elif what == "reset":
            cache.reset()
        elif what == "repeat" and 0 < rows < 4:
            cache.batch_repeat_interleave(2)
        elif what == "reorder" and rows:
            picked = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
            cache.reorder_cache(torch.tensor(picked))
        elif what == "drop":
            self.caches.remove(cache)
            del cache
            gc.collect()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), pins=st.booleans())
    def pin(self, data, pins):
        prompt = data.draw(st.sampled_from(self.prompts))
        (self.pool.pin_prefix if pins else self.pool.unpin_prefix)(prompt)

    @rule(length=st.integers(1, 20), kind=st.sampled_from(({}, {"n": 3, "do_sample": True}, {"num_beams": 2})))
    def add_a_request(self, length, kind):
        prompt = [3 + i % 5 for i in range(length)]
        try:
            self.names.append(self.batcher.add_request(prompt, max_new_tokens=6, **{"do_sample": False} | kind))
        except RequestTooLongError:
            return

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.batcher.step()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data):
        self.batcher.abort(data.draw(st.sampled_from(self.names)))

    @invariant()
    def the_map_is_what_the_pool_holds(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        check(self.pool.memory_map(), self.pool)
        memory = self.batcher.memory_map()
        check(memory, self.pool)
        assert [each.is_own for each in memory.sequences] == [each.kind == "request" for each in memory.sequences]
        assert not [each for each in memory.sequences if each.kind == "other"], "a sequence that nobody owns"
        for cache in self.caches:
            own = [each for each in cache.memory_map().sequences if each.is_own]
            tables = [sequence.tables for sequence in cache._rows.sequences]
            assert [each.blocks for each in own] == [
                tuple(tuple(table.blocks) for table in row) for row in tables if any(table.blocks for table in row)
            ]

    def teardown(self):
        if hasattr(self, "batcher"):
            self.batcher.close()


TestMapping = Mapping.TestCase
TestMapping.settings = settings(
    max_examples=30, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def cache():
    model = tiny_models.shared("llama")
    yield PagedCache(model, block_size=4, num_blocks=40)
    hfpaged.unpatch(model)


def test_blocks_of_one_row_are_counted_by_hand(cache):
    generate(cache, [[5, 6, 7, 8, 9, 10, 11, 12, 13]], max_new_tokens=3)
    memory = cache.memory_map()
    (row,) = memory.sequences
    assert (row.name, row.kind, row.tokens, row.is_own) == ("cache 0 row 0", "cache", 11, True)
    assert (row.num_blocks, memory.shared_of(row)) == (3, 0)
    assert [memory.filled[block] for block in row.all_blocks] == [4, 4, 3]
    assert [memory.state(block) for block in (*row.all_blocks, 39)] == ["used"] * 3 + ["unused"]
    assert memory.holders(row.all_blocks[0]) == ["cache 0 row 0"]
    assert repr(memory) == "MemoryMap(3 of 40 blocks used, 0 shared, 0 cached, 1 sequences)"


def test_a_fork_shares_its_blocks_and_has_a_number_of_its_own_which_it_keeps(cache):
    generate(cache, [[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4]], max_new_tokens=3)
    fork = copy.deepcopy(cache)
    memory = fork.memory_map()
    assert [(each.name, each.is_own) for each in memory.sequences] == [
        ("cache 1 row 0", True), ("cache 1 row 1", True), ("cache 0 row 0", False), ("cache 0 row 1", False),
    ]  # fmt: skip
    assert memory.num_shared == memory.num_used == memory.num_saved == 4
    assert memory.holders(memory.sequences[0].all_blocks[0]) == ["cache 1 row 0", "cache 0 row 0"]
    assert "cache 1 row 0 * " in str(memory)
    assert "cache 0 row 0   " in str(memory)
    pool = cache.pool
    cache.reset()
    assert [each.name for each in pool.memory_map().sequences] == ["cache 1 row 0", "cache 1 row 1"]


def test_what_is_cached_and_what_is_pinned_are_told_apart(cache):
    prompt = list(range(5, 17))
    generate(cache, [prompt], max_new_tokens=1)
    cache.reset()
    assert [cache.memory_map().state(block) for block in range(4)] == ["cached"] * 3 + ["unused"]
    assert cache.pool.pin_prefix(prompt) == 12
    memory = cache.memory_map()
    assert [(each.name, each.kind, each.tokens) for each in memory.sequences] == [("pinned 0", "pinned", 12)]
    assert (memory.num_cached, memory.num_used) == (0, 3)
    assert cache.pool.unpin_prefix(prompt)


def test_each_layer_group_has_its_blocks_and_those_behind_a_window_are_gone():
    model = tiny_models.shared("gpt_oss")
    cache = PagedCache(model, block_size=4, num_blocks=60)
    generate(cache, [list(range(3, 43))], max_new_tokens=2)
    memory = cache.memory_map()
    (row,) = memory.sequences
    by_window = dict(zip(memory.windows, map(len, row.blocks), strict=True))
    assert (row.tokens, by_window[None]) == (41, 11)
    assert by_window[12] in (3, 4)
    assert "2 layer groups (window 12, full)" in str(memory)
    assert not set(row.blocks[0]) & set(row.blocks[1])
    hfpaged.unpatch(model)


def test_rows_that_forget_are_mapped_as_they_lie():
    model = tiny_models.shared("llama")
    cache = PagedCache(model, block_size=4, num_blocks=60, window=16, sinks=4)
    generate(cache, [list(range(3, 63))], max_new_tokens=5)
    memory = cache.memory_map()
    check(memory, cache.pool)
    (row,) = memory.sequences
    assert row.num_blocks < 16 <= row.tokens // 4
    hfpaged.unpatch(model)


def test_what_residuals_take_of_the_memory_is_missed_where_blocks_are_free():
    model = tiny_models.shared("llama")
    cache = PagedCache(model, block_size=16, memory="1MiB", kv_dtype="int4")
    generate(cache, [list(range(3, 43)), list(range(13, 53))], max_new_tokens=5)
    memory = cache.memory_map()
    check(memory, cache.pool)
    assert memory.reserved == cache.pool.blocks.stats.reserved > 0
    hfpaged.unpatch(model)


def test_maps_that_are_taken_in_the_middle_of_steps_are_whole():
    batcher = StubBatcher("gpt_oss", block_size=2, num_blocks=120, max_num_seqs=6, max_num_batched_tokens=20)
    for number in range(60):
        batcher.add_request(
            [5, 6, 7, number % 5 + 3] * (number % 4 + 1), max_new_tokens=9, do_sample=False, num_beams=2
        )

    def run():
        while batcher.has_work:
            batcher.step()

    thread = threading.Thread(target=run)
    thread.start()
    used = set()
    while thread.is_alive():
        memory = batcher.memory_map()
        held = Counter(block for sequence in memory.sequences for block in sequence.all_blocks)
        assert {block: count for block, count in enumerate(memory.refcounts) if count} == held
        used.add(memory.num_used)
        time.sleep(0.001)  # locks are not fair: who asks without a pause may keep the steps waiting for minutes
    thread.join()
    assert len(used) > 5
    batcher.close()


def test_requests_are_named_by_their_ids_with_their_samples_and_beams():
    batcher = batcher_of("llama", block_size=4, max_num_seqs=16)
    for name, arguments in {"one": {}, "three": {"n": 3, "do_sample": True}, "searched": {"num_beams": 2}}.items():
        batcher.add_request([5, 6, 7, 8, 9], max_new_tokens=5, request_id=name, **{"do_sample": False} | arguments)
    for _ in range(3):
        batcher.step()
    memory = batcher.memory_map()
    assert {each.name for each in memory.sequences} == {
        "one", "three sample 0", "three sample 1", "three sample 2", "searched beam 0", "searched beam 1",
    }  # fmt: skip
    assert all(each.is_own and each.kind == "request" for each in memory.sequences)
    while batcher.has_work:
        batcher.step()
    assert batcher.memory_map().sequences == ()
    checked(batcher)


def test_a_map_is_of_its_moment_and_cannot_be_changed(cache):
    generate(cache, [[5, 6, 7, 8, 9]])
    memory = cache.memory_map()
    before = memory.to_dict()
    cache.reset()
    assert memory.to_dict() == before
    with pytest.raises(AttributeError):
        memory.num_blocks = 3


def test_a_pool_that_has_no_size_yet_has_an_empty_map():
    pool = PagedCache(config=tiny_models.shared("llama").config).pool
    memory = pool.memory_map()
    assert str(memory) == "0 of 0 blocks used (0 shared), 0 free (0 of them cached), 16 tokens a block"
    assert memory.plot() is not None


def made(total, sequences, cached=(), ever=None):
    """A map of these sequences, lists of block ids."""
    refcounts = Counter(block for blocks in sequences.values() for block in blocks)
    ever = max([*refcounts, *cached], default=-1) + 1 if ever is None else ever
    return MemoryMap(
        block_size=16, block_bytes=1024, num_blocks=total, windows=(None,),
        refcounts=tuple(refcounts[block] for block in range(ever)), filled=(16,) * ever, cached=frozenset(cached),
        reserved=0,
        sequences=tuple(
            SequenceBlocks(name, "cache", 16 * len(blocks), (tuple(blocks),)) for name, blocks in sequences.items()
        ),
    )  # fmt: skip


def test_the_table_names_the_largest_and_sums_the_rest():
    memory = made(100, {f"s{number}": range(number * 5, number * 5 + number + 1) for number in range(5)})
    assert memory.table(2).splitlines() == [
        "15 of 100 blocks used (0 shared), 85 free (0 of them cached), 16 tokens a block, 1.0 KiB each",
        "5 sequences hold 15 blocks",
        "",
        "sequence  blocks  shared  tokens    bytes",
        "s3             4       0      64  4.0 KiB",
        "s4             5       0      80  5.0 KiB",
        "3 more         6       0      96  6.0 KiB",
    ]


def test_the_table_tells_what_sharing_saves():
    memory = made(10, {"a": [0, 1, 2], "b": [0, 1, 3]})
    assert "2 sequences hold 6 blocks in 4: sharing saves 2.0 KiB" in str(memory)


def test_a_cell_of_a_small_pool_is_one_block():
    grid = grid_of(made(16, {"a": [0, 1, 2], "b": [0, 4]}, cached=[5], ever=7))
    assert grid.cells == (0, 0, 0, FREE, 1, CACHED, FREE, *[UNUSED] * 9)
    assert (grid.shared, grid.names, grid.per_cell, grid.columns) == ({0}, ("a", "b"), 1, 8)


def test_a_cell_of_a_large_pool_is_what_most_of_its_blocks_are():
    memory = made(100_000, {"a": range(100), "b": [*range(30), *range(100, 70_000)]})
    grid = grid_of(memory)
    assert grid.per_cell == 64
    assert len(grid.cells) == -(-100_000 // 64) <= MOST_CELLS
    assert (grid.cells[0], grid.cells[1], grid.cells[2], grid.cells[-1]) == (0, 0, 1, UNUSED)
    assert grid.shared == frozenset()
    assert grid_of(made(100_000, {"a": range(32), "b": range(70_000)})).shared == {0}


def test_of_a_pool_that_is_mostly_unused_the_beginning_is_shown():
    grid = grid_of(made(50_000, {"a": range(30)}))
    assert (grid.num_shown, grid.per_cell) == (40, 1)
    assert Counter(grid.cells) == {0: 30, UNUSED: 10}


def test_of_many_sequences_the_largest_have_colours_and_the_others_two_greys():
    memory = made(
        600, {f"s{number}": range(10 * number, 10 * number + (9 if number == 40 else 5)) for number in range(50)}
    )
    grid = grid_of(memory)
    assert len(grid.names) == MOST_NAMES == len(PALETTE)
    assert "s40" in grid.names
    assert grid.num_others == 50 - MOST_NAMES
    assert {grid.cells[100], grid.cells[110]} == set(OTHERS)


def colour_of(figure, grid, block, dx=0.25, dy=0.25):
    """At a place inside of a block's cell, of which 0, 0 is the upper left corner."""
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())
    (axes,) = figure.axes
    row, column = divmod(block, grid.columns)
    x, y = axes.transData.transform((column + dx, row + dy))
    return "#{:02X}{:02X}{:02X}".format(*picture[picture.shape[0] - 1 - int(y), int(x)][:3])


def test_the_picture_shows_each_block_in_its_owners_colour_and_strikes_shared_ones_through():
    memory = made(16, {"a": [0, 1, 2], "b": [0, 4]}, cached=[5], ever=7)
    figure, grid = memory.plot(), grid_of(memory)
    assert [colour_of(figure, grid, block) for block in (0, 1, 4)] == [PALETTE[0], PALETTE[0], PALETTE[1]]
    plain = {colour_of(figure, grid, block) for block in (3, 5, 10)}
    assert len(plain) == 3
    assert not plain & set(PALETTE)
    # In the middle of a cell there is the stroke of what is shared, the dot of what is cached, or nothing.
    assert [colour_of(figure, grid, block, 0.5, 0.5)[1] for block in (0, 5)] == ["2", "2"]
    assert colour_of(figure, grid, 1, 0.5, 0.5) == PALETTE[0]


@pytest.mark.parametrize("total", [1, 16, 2048, 100_000])
def test_pools_of_all_sizes_are_written_as_png(tmp_path, total):
    share = max(total // 400, 1)
    sequences = {f"request-{number}": range(number * share, (number + 1) * share) for number in range(min(total, 300))}
    path = tmp_path / "map.png"
    memory = made(total, sequences)
    assert memory.plot(path) is None
    assert path.read_bytes().startswith(PNG)
    assert memory._repr_png_().startswith(PNG)
    figure = memory.plot()
    assert figure._repr_png_().startswith(PNG)
    (legend,) = figure.legends
    assert len(legend.get_texts()) <= MOST_NAMES + 5
    (axes,) = figure.axes
    assert (f"a cell is {64 if total == 100_000 else 1} blocks" in axes.get_title(loc="left")) == (total == 100_000)


def test_a_path_that_is_no_png_is_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"only PNG is drawn; give a name that ends with \.png"):
        made(4, {}).plot(tmp_path / "map.svg")


def test_without_matplotlib_the_remedy_is_told_and_a_notebook_shows_the_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    memory = made(4, {"a": [0]})
    with pytest.raises(InvalidConfigError, match=r"pip install 'hfpaged\[plot\]'"):
        memory.plot()
    assert memory._repr_png_() is None
    assert "1 of 4 blocks used" in str(memory)


def test_long_names_are_cut_in_the_middle():
    grid = grid_of(made(4, {"request-0123456789-0123456789-0123456789 sample 7": [0]}))
    (name,) = grid.names
    assert len(name) <= 27
    assert name.startswith("request-0")
    assert name.endswith("sample 7")
