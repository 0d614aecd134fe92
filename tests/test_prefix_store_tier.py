"""A prefix store below the pool of a cache: another pool begins with what this one computed, and only with that."""

from __future__ import annotations

import time

import pytest
import torch
from tiny_models import make, prompts, shared
from transformers import DynamicCache

import hfpaged
from hfpaged import prefix_store_block, prefix_store_tier
from hfpaged.compat import cache_argument
from hfpaged.errors import InvalidConfigError
from hfpaged.prefix_store_tier import add_prefix_store

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
OPTIONS = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(autouse=True)
def unpatched():
    """The models of `shared` are used by other files too."""
    yield
    for name in ("llama", "gemma2", "mistral"):
        hfpaged.unpatch(shared(name))


def service(model, path, num_blocks=128, **options):
    """A cache on a pool of its own over the store in `path`."""
    cache = hfpaged.PagedCache(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, **options)
    return cache, add_prefix_store(cache.pool, path)


def generate(model, cache, inputs, new=6):
    return model.generate(**inputs, **OPTIONS, max_new_tokens=new, **{cache_argument(): cache})


def computed(model, path, inputs=None, **options):
    """A service that has computed and written, and is gone in peace; its store."""
    cache, tier = service(model, path, **options)
    generate(model, cache, inputs or prompts([37]))
    cache.free()
    assert tier.writer.flush(60)
    cache.pool.check_integrity()
    tier.writer.end(10)
    return tier.store


def hits_and_same(model, cache, inputs, tolerance=1e-4):
    """Generates, compares with transformers' own cache, and returns how many prompt tokens were known."""
    paged = generate(model, cache, inputs)
    hits = cache.stats().prefix_hits
    cache.pool.check_integrity()
    hfpaged.unpatch(model)
    plain = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(paged.sequences, plain.sequences)
    for ours, theirs in zip(paged.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    cache.free()
    cache.pool.check_integrity()
    return hits


def test_a_copy_of_a_model_with_one_row_of_weights_changed_finds_nothing(tmp_path):
    model, inputs = make("llama"), prompts([37])
    computed(model, tmp_path, inputs)
    other = make("llama")
    with torch.no_grad():
        other.get_input_embeddings().weight[int(inputs["input_ids"][0, 5])] += 3
    cache, _ = service(other, tmp_path)
    assert hits_and_same(other, cache, inputs) == 0


def test_a_row_of_weights_that_is_changed_between_two_calls_is_seen():
    model, inputs = make("llama"), prompts([37])
    cache = hfpaged.PagedCache(model, num_blocks=128, block_size=BLOCK_SIZE)
    generate(model, cache, inputs)
    cache.free()
    with torch.no_grad():
        model.get_input_embeddings().weight[int(inputs["input_ids"][0, 5])] += 3
    assert hits_and_same(model, hfpaged.PagedCache(model, pool=cache.pool), inputs) == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("lengths", [[37], [41, 33, 18]])
def test_another_service_begins_with_what_one_computed(name, lengths, tmp_path):
    model, inputs = make(name), prompts(lengths)
    store = computed(model, tmp_path, inputs)
    assert store.counts.written > 0
    cache, tier = service(model, tmp_path)
    hits = hits_and_same(model, cache, inputs)
    assert hits > sum(lengths) / 2
    assert tier.store.counts.read > 0
    assert (tier.store.counts.damaged, tier.store.counts.failed) == (0, 0)


@pytest.mark.parametrize("swap_space", [0, "1MiB"])
def test_what_a_full_pool_evicted_comes_back(swap_space, tmp_path):
    model = shared("llama")
    cache, tier = service(model, tmp_path, num_blocks=16, swap_space=swap_space)
    for seed in range(4):
        generate(model, cache, prompts([37], seed))
        cache.free()
        assert tier.writer.flush(60)
    before = cache.stats().prefix_hits
    assert hits_and_same(model, cache, prompts([37], 0)) - before >= 32
    if not swap_space:
        assert tier.store.counts.read >= 8


def test_what_is_evicted_before_it_was_written_is_written_all_the_same(tmp_path, monkeypatch):
    model = shared("llama")
    cache, tier = service(model, tmp_path, num_blocks=16)
    monkeypatch.setattr(tier, "stored", lambda entry, group: None)
    cache.pool.prefixes.index.watchers.remove(tier)
    for seed in range(3):
        generate(model, cache, prompts([37], seed))
        cache.free()
    assert tier.writer.flush(60)
    assert tier.store.counts.written >= 11
    other, _ = service(model, tmp_path)
    assert hits_and_same(model, other, prompts([37], 0)) >= 32


def test_a_pool_writes_what_it_restored_no_second_time(tmp_path):
    model = shared("llama")
    written = computed(model, tmp_path).counts.written
    cache, tier = service(model, tmp_path)
    generate(model, cache, prompts([37]))
    assert tier.writer.flush(60)
    assert tier.store.counts.written == 0
    assert len(list(tmp_path.iterdir())) == written


def test_blocks_that_are_used_again_are_kept_and_written_again_if_they_went(tmp_path, monkeypatch):
    model = shared("llama")
    cache, tier = service(model, tmp_path)
    generate(model, cache, prompts([37]))
    cache.free()
    assert tier.writer.flush(60)
    for file in list(tmp_path.iterdir())[:4]:
        file.unlink()
    generate(model, cache, prompts([37]))
    cache.free()
    assert tier.writer.flush(60)
    assert tier.store.counts.written == tier.store.folder.num_files
    count = tier.store.counts.written
    monkeypatch.setattr(prefix_store_tier, "_USED_SECONDS", 0.0)
    generate(model, cache, prompts([37]))
    assert tier.writer.flush(60)
    assert count < tier.store.counts.written <= count + 4


@pytest.mark.parametrize("ours", ["weights", "config", "kv format", "block size", "salt", "version"])
def test_what_belongs_to_others_is_not_found(ours, tmp_path, monkeypatch):
    model, options = make("llama"), {}
    computed(model, tmp_path, salt="tenant-a" if ours == "salt" else None)
    other = make("llama", rms_norm_eps=1e-4) if ours == "config" else model
    if ours == "weights":
        with torch.no_grad():
            next(model.parameters()).add_(0.01)
    elif ours == "kv format":
        options = {"kv_dtype": "bfloat16"}
    elif ours == "salt":
        options = {"salt": "tenant-b"}
    elif ours == "version":
        versions = prefix_store_block.installed_versions() | {"transformers": "5.99"}
        monkeypatch.setattr(prefix_store_block, "installed_versions", lambda: versions)
    cache, tier = service(other, tmp_path, **options)
    if ours == "block size":
        cache = hfpaged.PagedCache(other, num_blocks=64, block_size=8)
        tier = add_prefix_store(cache.pool, tmp_path)
    hits_and_same(other, cache, prompts([37]), 0.1 if ours == "kv format" else 1e-4)
    assert cache.stats().prefix_hits == 0
    assert (tier.store.counts.read, tier.store.counts.damaged) == (0, 0)


def test_no_salt_stands_in_any_file_and_the_right_one_finds(tmp_path):
    model = shared("llama")
    computed(model, tmp_path, salt="tenant-secret")
    assert all(b"tenant-secret" not in file.read_bytes() for file in tmp_path.iterdir())
    cache, _ = service(model, tmp_path, salt="tenant-secret")
    assert hits_and_same(model, cache, prompts([37])) >= 32
    cache, _ = service(model, tmp_path)
    assert hits_and_same(model, cache, prompts([37])) == 0


def test_damaged_files_are_computed_anew(tmp_path):
    model = shared("llama")
    computed(model, tmp_path)
    for number, file in enumerate(sorted(tmp_path.iterdir())):
        raw = bytearray(file.read_bytes())
        raw[-1 - number * 7] ^= 16
        file.write_bytes(raw[: len(raw) - number % 2])
    hits = []
    for _ in range(3):  # the first one sees the first file only, the second one all others
        cache, tier = service(model, tmp_path)
        hits.append(hits_and_same(model, cache, prompts([37])))
        assert tier.writer.flush(60)
        assert (tier.store.counts.damaged > 0) == (len(hits) < 3)
    assert hits[:2] == [0, BLOCK_SIZE]
    assert hits[2] >= 32


def test_the_files_of_a_prompt_of_which_some_are_gone_serve_as_far_as_they_go(tmp_path):
    model = shared("llama")
    cache, tier = service(model, tmp_path)
    generate(model, cache, prompts([37]))
    assert tier.writer.flush(60)
    (root,) = cache.pool.prefixes.index.roots
    entry = next(iter(root.children.values()))
    for _ in range(3):
        entry = next(iter(entry.children.values()))
    tier.store.folder.remove(tier._addresses.of(entry).name(0))  # the fourth block
    cache.free()
    other, _ = service(model, tmp_path)
    assert hits_and_same(model, other, prompts([37])) == 3 * BLOCK_SIZE


def test_saved_prefixes_of_a_block_file_belong_to_nobody(tmp_path):
    model = shared("llama")
    computed(model, tmp_path)
    cache = hfpaged.PagedCache(model, num_blocks=64, block_size=BLOCK_SIZE)
    for file in tmp_path.iterdir():
        cache.pool.load_prefixes(file)
    assert hits_and_same(model, cache, prompts([37])) == 0


def test_forgetting_prefixes_leaves_files_that_belong_to_others_too(tmp_path):
    model = shared("llama")
    cache, tier = service(model, tmp_path)
    generate(model, cache, prompts([37]))
    cache.free()
    assert tier.writer.flush(60)
    files = set(tmp_path.iterdir())
    assert cache.pool.drop_prefixes() > 0
    assert set(tmp_path.iterdir()) == files


def test_a_pool_has_one_store(tmp_path):
    cache, _ = service(shared("llama"), tmp_path)
    with pytest.raises(InvalidConfigError, match=r"has a prefix store in .*, at most 10.0 GiB below it already"):
        add_prefix_store(cache.pool, tmp_path)


def test_a_pool_that_is_gone_ends_its_threads(tmp_path):
    model = shared("llama")
    cache, tier = service(model, tmp_path)
    generate(model, cache, prompts([37]))
    assert tier.writer.flush(60)
    thread = tier.writer._thread
    del cache
    for _ in range(100):
        if not thread.is_alive():
            break
        time.sleep(0.05)
    assert not thread.is_alive()
