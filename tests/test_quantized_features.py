"""What a cache can do besides generating, in every format: each time against `simulated.py`, and nothing is left."""

from __future__ import annotations

import copy
import threading

import hfpaged_kernels as kernels
import pytest
import simulated
import tiny_models
import torch
from test_quantized_tokens import check_freed, check_rows
from test_same_tokens import CACHE

import hfpaged
from hfpaged.errors import OutOfBlocksError, PrefixFileError

FORMATS = ["int8", "fp8_e4m3", "k8v4", "int4"]
BLOCK, ROWS = 8, 3
every_format = pytest.mark.parametrize("fmt", FORMATS)


pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(length, seed=0, rows=ROWS):
    return torch.randint(3, tiny_models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


class Pair:
    """A cache of a patched model and its judge of an unpatched one with the same weights, step by step."""

    def __init__(self, fmt, pool=None, cache=None, judge=None, name="llama", **options):
        self.fmt, self.name = fmt, name
        self.model, self.plain = patched(name), tiny_models.shared(name)
        sizes = {"pool": pool} if pool else {"block_size": BLOCK, "num_blocks": 200, "kv_dtype": fmt}
        self.cache = cache or hfpaged.PagedCache(self.model, **sizes, **options)
        self.judge = judge or simulated.SimulatedCache(self.plain.config, fmt, BLOCK)

    @property
    def both(self):
        return (self.cache, self.judge)

    @torch.no_grad()
    def step(self, ids):
        ours = self.model(ids, **{CACHE: self.cache}).logits
        theirs = self.plain(ids, **{CACHE: self.judge}).logits
        check_rows(ours.transpose(0, 1), theirs.transpose(0, 1), len(ids))
        self.cache.pool.check_integrity()

    def steps(self, count, seed=9, rows=ROWS):
        for ids in tokens(count, seed, rows).split(1, dim=1):
            self.step(ids)

    def do(self, what, *arguments):
        for each in self.both:
            getattr(each, what)(*arguments)
        self.cache.pool.check_integrity()

    def fork(self):
        return Pair(self.fmt, cache=copy.deepcopy(self.cache), judge=copy.deepcopy(self.judge), name=self.name)


MODELS = {}


def patched(name):
    """A model of its own, which stays patched."""
    if name not in MODELS:
        MODELS[name] = tiny_models.make(name)
    return MODELS[name]


@every_format
@pytest.mark.parametrize("removed", [1, 3, 5, 6, 9, 13, 14, 26])
def test_cropped_caches_go_on(fmt, removed):
    """Into the block that is not full, to its edge, into blocks that are, and to nothing."""
    pair = Pair(fmt)
    pair.step(tokens(21))
    pair.steps(5)
    pair.do("crop", -removed)
    pair.step(tokens(1, 2))
    pair.do("crop", -1)
    pair.step(tokens(10, 3))
    pair.steps(3)
    check_freed(pair.cache)


@every_format
@pytest.mark.parametrize("length", [13, 16, 21])
def test_forks_part(fmt, length):
    pair = Pair(fmt)
    pair.step(tokens(length))
    pair.steps(2)
    child = pair.fork()
    grandchild = child.fork()
    for seed in range(4):
        pair.step(tokens(1, seed))
        child.step(tokens(3, 10 + seed))
    child.do("crop", -11)
    grandchild.steps(9, 20)
    child.steps(7, 30)
    pool = pair.cache.pool
    pair.cache.free()
    grandchild.cache.free()
    check_freed(child.cache)
    assert pool is child.cache.pool


@every_format
def test_rows_are_chosen_reordered_and_repeated(fmt):
    pair = Pair(fmt)
    pair.step(tokens(13))
    pair.do("reorder_cache", torch.tensor([2, 2, 0]))
    pair.steps(2)
    pair.do("batch_repeat_interleave", 2)
    pair.steps(5, rows=6)
    pair.do("batch_select_indices", torch.tensor([5, 0, 3]))
    pair.steps(9)
    check_freed(pair.cache)


@every_format
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["before the first layer", "between two layers"])
@pytest.mark.parametrize("cropped", [0, 4])
def test_a_forward_that_was_broken_off_never_was(fmt, error, place, cropped):
    """At every place of a block; behind a crop it opens what was full, and a token more is read back from there."""
    pair = Pair(fmt)
    pair.step(tokens(17))
    target = pair.model.model.layers[1] if place == "between two layers" else pair.model.model.embed_tokens

    def fail(*_):
        raise error

    for position in range(10):
        if cropped and position == 2:
            pair.do("crop", -cropped)
            pair.step(tokens(1, 50))
        hook = target.register_forward_pre_hook(fail)
        with pytest.raises(error), torch.no_grad():
            pair.model(tokens(1 + position % 3, position), **{CACHE: pair.cache})
        hook.remove()
        pair.cache.pool.check_integrity()
        pair.step(tokens(1, position))
    check_freed(pair.cache)


@every_format
def test_a_known_prefix_is_read_as_it_is_stored(fmt):
    """The second prompts end inside of a block of the first, which is copied and opened again."""
    first, rest, shared = tokens(40, 1, 1), tokens(10, 2), 27
    pair = Pair(fmt)
    pair.step(first)
    pair.do("crop", shared - 40)
    pair.do("batch_repeat_interleave", ROWS)
    second = torch.cat([first[:, :shared].expand(ROWS, -1), rest], dim=1)
    pool = pair.cache.pool
    cache = hfpaged.PagedCache(pair.model, pool=pool)
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ours = pair.model.generate(second, **arguments, **{CACHE: cache})
    assert [report.hit_tokens for report in cache.explain_last()] == [shared] * ROWS
    theirs = pair.plain.generate(second, **arguments, **{CACHE: pair.judge})
    check_rows(torch.stack(ours.logits), torch.stack(theirs.logits), ROWS)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    pair.cache.free()
    check_freed(cache)


@every_format
def test_saved_prefixes_give_in_another_pool_what_they_gave_in_this_one(fmt, tmp_path):
    model, prompt = patched("llama"), tokens(30, 4, 1)
    arguments = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    sizes = {"block_size": BLOCK, "num_blocks": 60}
    warm = hfpaged.PagedCache(model, kv_dtype=fmt, **sizes)
    model.generate(prompt, **arguments, **{CACHE: warm})
    warm.free()
    pool, file = warm.pool, tmp_path / "prefixes"
    saved = pool.save_prefixes(file)
    again = hfpaged.PagedCache(model, pool=pool)
    wanted = model.generate(prompt, **arguments, **{CACHE: again})
    other = hfpaged.PagedCache(model, kv_dtype=fmt, **sizes)
    assert other.pool.load_prefixes(file).blocks == saved.blocks == 4
    ours = model.generate(prompt, **arguments, **{CACHE: other})
    assert other.explain_last()[0].hit_tokens == again.explain_last()[0].hit_tokens == 29
    assert torch.equal(torch.stack(ours.logits), torch.stack(wanted.logits))
    check_freed(other)
    for wrong in ("auto", *(name for name in FORMATS if name != fmt)):
        with pytest.raises(PrefixFileError, match=f"KV format of {fmt}, this one has {wrong}"):
            hfpaged.PagedCache(model, kv_dtype=wrong, **sizes).pool.load_prefixes(file)


@every_format
def test_a_pool_that_is_too_small_harms_nobody_else(fmt):
    pair = Pair(fmt, prefix_sharing=False)
    pair.step(tokens(21))
    greedy = hfpaged.PagedCache(pair.model, pool=pair.cache.pool, prefix_sharing=False)
    ids = torch.cat([tokens(33, seed, 1) for seed in range(50)])
    with pytest.raises(OutOfBlocksError), torch.no_grad():
        pair.model(ids, **{CACHE: greedy})
    pair.cache.pool.check_integrity()
    pair.steps(9)
    del greedy
    check_freed(pair.cache)


@every_format
def test_prefixes_are_evicted_for_those_who_come(fmt):
    pool = Pair(
        fmt, cache=hfpaged.PagedCache(patched("llama"), kv_dtype=fmt, block_size=BLOCK, num_blocks=16)
    ).cache.pool
    for seed in range(6):
        pair = Pair(fmt, pool=pool)
        pair.step(tokens(25, seed))
        pair.steps(9, seed + 70)
        check_freed(pair.cache)
    assert pool.stats().prefix_evictions > 0


@every_format
def test_a_stream_keeps_its_window_and_its_sinks(fmt):
    """Keys of the first layer depend on tokens and positions alone: they are those of a native stream, in codes."""
    model, found = patched("llama"), {}
    for kind in ("auto", fmt):
        cache = hfpaged.PagedCache(model, kv_dtype=kind, block_size=BLOCK, num_blocks=60, window=32, sinks=8)
        with torch.no_grad():
            for ids in tokens(150, 3, 2).split(5, dim=1):
                model(ids, **{CACHE: cache})
                cache.pool.check_integrity()
        tables = [sequence.tables[0] for sequence in cache._rows.sequences]
        assert all(table.first > 5 for table in tables)
        lengths = torch.tensor([table.length - table.first * BLOCK for table in tables])
        (store,) = cache.pool.layer_stores[0]
        blocks = torch.tensor([list(table.blocks) for table in tables], dtype=torch.int32)
        where = None
        if cache.pool.residuals:
            ends = [int(table.blocks[-1]) for table in tables]
            where = torch.tensor([cache.pool.residuals.of(block) for block in ends], dtype=torch.int32)
        found[kind] = kernels.gather(store.key, blocks, lengths.to(torch.int32), where)
        check_freed(cache)
    off = (found["auto"] - found[fmt]).abs().amax() / found["auto"].abs().amax()
    assert 0 < off < (0.07 if fmt in ("int4", "fp8_e4m3") else 0.01)


@every_format
def test_two_threads_on_one_pool(fmt):
    model = patched("llama")
    pool = hfpaged.PagedCache(model, kv_dtype=fmt, block_size=BLOCK, num_blocks=400).pool
    failed = []

    def run(seed):
        try:
            for turn in range(3):
                pair = Pair(fmt, pool=pool)
                pair.step(tokens(13, seed + turn))
                pair.steps(8, seed + turn + 1)
                pair.fork().steps(5, seed + 50)
                pair.steps(5, seed + 60)
                pair.cache.free()
        except BaseException as error:
            failed.append(error)

    tiny_models.shared("llama")
    threads = [threading.Thread(target=run, args=(100 * number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    check_freed(hfpaged.PagedCache(model, pool=pool))


@every_format
def test_caches_that_nobody_holds_leave_nothing(fmt):
    pair = Pair(fmt)
    pair.step(tokens(21))
    forks = [pair.fork() for _ in range(3)]
    for number, fork in enumerate(forks):
        fork.steps(number + 1)
    pool = pair.cache.pool
    assert pool.residuals is None or pool.residuals.num_open > 0
    del pair, forks, fork
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks
    assert pool.residuals is None or pool.residuals.num_open == 0


@every_format
@pytest.mark.parametrize("length", [21, 13])
def test_keys_assigned_to_one_layer_leave_all_others_as_they_are(fmt, length):
    """Also where the last block was full once, and after a forward that failed."""
    pair = Pair(fmt, prefix_sharing=False)
    pair.step(tokens(21))
    pair.do("crop", length - 21 or 0)
    layers = pair.cache.layers
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    layers[0].keys = layers[0].keys * 2
    assert torch.equal(layers[0].values, before[0][1])
    assert torch.equal(layers[1].keys, before[1][0])
    assert torch.equal(layers[1].values, before[1][1])
    size = before[0][0].abs().max()
    assert (layers[0].keys - 2 * before[0][0]).abs().max() < 0.15 * size
    after = layers[0].keys.clone()
    hook = pair.model.model.embed_tokens.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.model(tokens(1), **{CACHE: pair.cache})
    hook.remove()
    assert torch.equal(layers[0].keys, after)
    assert torch.equal(layers[1].keys, before[1][0])
    check_freed(pair.cache)
