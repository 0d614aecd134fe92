from __future__ import annotations

import gc
import json
import os
import random
import struct
import subprocess
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make, prompts, shared
from transformers import DynamicCache

import hfpaged
from hfpaged import prefix_loading, prefix_manifest, tensor_file
from hfpaged.block_hash import ExtraKey
from hfpaged.compat import cache_argument
from hfpaged.errors import InvalidConfigError, PrefixFileError
from hfpaged.prefix_loading import LoadedPrefixes

BLOCK_SIZE = 4
OPTIONS = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def unpatched():
    """The models of `shared` are used by other files too."""
    yield
    for name in ("llama", "gemma2", "mistral"):
        hfpaged.unpatch(shared(name))


def cache_of(model, num_blocks=64, **options):
    if "pool" in options:
        num_blocks = None
    return hfpaged.PagedCache(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, **options)


def generate(model, cache, inputs, new=6):
    return model.generate(**inputs, **OPTIONS, max_new_tokens=new, **{cache_argument(): cache})


def warm(model, inputs=None, **options):
    """A pool in which nobody holds anything, and what was generated lies published."""
    cache = cache_of(model, **options)
    generate(model, cache, inputs or prompts([37]))
    cache.free()
    cache.pool.check_integrity()
    return cache.pool


def same_as_plain(model, cache, inputs):
    """Generates, compares with transformers' own cache, and returns how many prompt tokens were known."""
    paged = generate(model, cache, inputs)
    hits = cache.stats().prefix_hits
    hfpaged.unpatch(model)
    plain = generate(model, DynamicCache(config=model.config), inputs)
    assert torch.equal(paged.sequences, plain.sequences)
    for ours, theirs in zip(paged.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    cache.free()
    cache.pool.check_integrity()
    return hits


def state(pool):
    """What must not change when a file is refused."""
    return pool.stats(), pool.blocks.published(), pool.blocks.cached, pool.blocks.high_water, pool.storage.num_stores


def refused(pool, path, words):
    before = state(pool)
    with pytest.raises(PrefixFileError, match=words) as caught:
        pool.load_prefixes(path)
    assert state(pool) == before
    pool.check_integrity()
    return str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file of llama's prefixes."""
    path = tmp_path_factory.mktemp("saved") / "prefixes.safetensors"
    warm(shared("llama")).save_prefixes(path)
    return path


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("lengths", [[37], [41, 33, 18]])
def test_another_pool_starts_warm_with_the_same_tokens_and_logits(name, lengths, tmp_path):
    model, inputs = make(name), prompts(lengths)
    source = warm(model, inputs, num_blocks=128)
    expected = cache_of(model, pool=source)
    known = generate(model, expected, inputs) and expected.stats().prefix_hits
    expected.free()
    done = source.save_prefixes(tmp_path / "p")
    assert done.bytes == (tmp_path / "p").stat().st_size
    cache = cache_of(model, num_blocks=128)
    loaded = cache.pool.load_prefixes(tmp_path / "p")
    cache.pool.check_integrity()
    assert (loaded.blocks, loaded.tokens) == (done.blocks, done.tokens)
    assert (loaded.known, loaded.left_out, loaded.other_models) == (0, 0, 0)
    stats = cache.stats()
    assert (stats.blocks_used, stats.blocks_cached) == (0, done.blocks)
    assert same_as_plain(model, cache, inputs) == known > sum(lengths) / 2


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_another_process_starts_warm(name, warm, tmp_path):
    def run(*arguments):
        worker = [warm, str(ROOT / "tests" / "prefix_files_worker.py"), name, *map(str, arguments)]
        done = subprocess.run(worker, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return torch.load(arguments[-1])

    first = run("tenant-a", "-", tmp_path / "p", tmp_path / "1")
    second = run("tenant-a", tmp_path / "p", "-", tmp_path / "2")
    assert first["hits"] == 0
    assert second["hits"] > 40
    assert second["loaded"]["blocks"] > 0
    assert torch.equal(second["tokens"], first["tokens"])
    for ours, theirs in zip(second["logits"], first["logits"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_it_is_a_plain_safetensors_file_that_only_its_owner_reads(saved):
    tensors = load_file(saved)
    blocks = len(tensors["tree.order"])
    assert tensors["layer.0.key"].shape == (blocks, 2, BLOCK_SIZE, 12)
    assert {f"layer.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")} < set(tensors)
    assert saved.stat().st_mode & 0o777 == 0o600
    ids = prompts([37])["input_ids"][0].tolist()
    assert tensors["tree.tokens"][:36].tolist() == ids[:36]


def test_blocks_in_use_are_saved_too(tmp_path):
    model, inputs = shared("llama"), prompts([37])
    cache = cache_of(model)
    generate(model, cache, inputs)
    held = cache.pool.blocks.published()
    assert not cache.pool.blocks.cached
    assert cache.pool.save_prefixes(tmp_path / "p").blocks == len(held) > 5
    other = cache_of(model)
    other.pool.load_prefixes(tmp_path / "p")
    assert same_as_plain(model, other, inputs) >= 36


def test_saving_changes_nothing_in_the_pool(tmp_path):
    pool = warm(shared("gemma2"))
    before = state(pool)
    pool.save_prefixes(tmp_path / "p")
    assert state(pool) == before


def test_an_empty_pool_gives_a_file_that_loads_as_nothing(tmp_path):
    model = shared("llama")
    assert cache_of(model).pool.save_prefixes(tmp_path / "p").blocks == 0
    pool = cache_of(model).pool
    assert pool.load_prefixes(tmp_path / "p") == LoadedPrefixes(0, 0, 0, 0, 0)
    pool.check_integrity()


def test_loading_twice_finds_all_blocks_known(saved):
    pool = cache_of(shared("llama")).pool
    first = pool.load_prefixes(saved)
    before = state(pool)
    again = pool.load_prefixes(saved)
    assert (again.blocks, again.tokens, again.known) == (0, 0, first.blocks)
    assert state(pool) == before


def test_what_is_known_in_part_is_completed(tmp_path):
    model = shared("llama")
    warm(model, prompts([41])).save_prefixes(tmp_path / "p")
    head = {key: value[:, :20] for key, value in prompts([41]).items()}
    cache = cache_of(model, pool=warm(model, head))
    loaded = cache.pool.load_prefixes(tmp_path / "p")
    cache.pool.check_integrity()
    assert loaded.known == 5
    assert loaded.blocks > 4
    index = cache.pool.prefixes.index
    (entry,) = index.roots[0].children.values()
    chain = [entry]
    while len(entry.children) == 1:
        (entry,) = entry.children.values()
        chain.append(entry)
    used = [cache.pool.blocks.cached.index(entry.blocks[0]) for entry in chain]
    assert used == sorted(used, reverse=True)  # the beginning goes last, although it was there before the rest
    assert same_as_plain(model, cache, prompts([41])) >= 40


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_order_of_use_is_kept(name, tmp_path):
    model = shared(name)
    cache = cache_of(model, num_blocks=128)
    for seed in range(3):
        generate(model, cache, prompts([24 + seed], seed))
        cache.free()
    old, new = cache.pool, cache_of(model, num_blocks=128).pool
    old.save_prefixes(tmp_path / "p")
    new.load_prefixes(tmp_path / "p")

    def order(pool):
        holder = pool.prefixes.index._holder
        return [(holder[block][0].digest, holder[block][1]) for block in pool.blocks.cached]

    assert order(new) == order(old)
    assert [root.keys for root in new.prefixes.index.roots] == [root.keys for root in old.prefixes.index.roots]


@pytest.mark.parametrize("room", [1, 2, 7, 11, 12, 13])
def test_a_small_pool_takes_the_beginning_of_what_was_used_last(room, tmp_path):
    model = shared("llama")
    cache = cache_of(model)
    for seed in (1, 2):
        generate(model, cache, prompts([37], seed))
        cache.free()
    total = cache.pool.save_prefixes(tmp_path / "p").blocks
    small = cache_of(model, num_blocks=room)
    loaded = small.pool.load_prefixes(tmp_path / "p")
    small.pool.check_integrity()
    assert (loaded.blocks, loaded.left_out) == (room, total - room)
    root = small.pool.prefixes.index.roots[0]
    lengths = []
    for seed in (2, 1):
        items = array("q", prompts([37], seed)["input_ids"][0].tolist())
        lengths.append(small.pool.prefixes.longest(root, items, 36).length(BLOCK_SIZE))
    own = total // 2
    prompt_blocks = 37 // BLOCK_SIZE
    assert lengths == [
        min(room, prompt_blocks) * BLOCK_SIZE,
        max(min(room - own, prompt_blocks), 0) * BLOCK_SIZE,
    ]


@pytest.mark.parametrize("room", [1, 2, 3, 5, 8, 13, 17, 23])
def test_a_small_pool_of_several_layer_groups_stays_whole_and_right(room, tmp_path):
    model = shared("gemma2")
    pool = warm(model, prompts([41, 30]))
    total = pool.save_prefixes(tmp_path / "p").blocks
    cache = cache_of(model, num_blocks=64)
    held = cache.pool.manager.create()
    with cache.pool.changing() as manager:
        manager.grow([(held, (64 - room) // 2 * BLOCK_SIZE)])
    free = cache.pool.num_free
    loaded = cache.pool.load_prefixes(tmp_path / "p")
    assert loaded.blocks == min(free, total)
    cache.pool.check_integrity()
    with cache.pool.changing() as manager:
        manager.free(held)
    same_as_plain(model, cache, prompts([41, 30]))


def test_loading_evicts_nothing(saved):
    model = shared("llama")
    pool = warm(model, prompts([30], seed=5), num_blocks=12)
    before = pool.blocks.cached
    loaded = pool.load_prefixes(saved)
    pool.check_integrity()
    assert loaded.blocks == 12 - len(before)
    assert set(before) < set(pool.blocks.cached)
    assert pool.stats().prefix_evictions == 0


def test_a_pool_sized_by_memory_loads_before_its_first_key(saved):
    model = shared("llama")
    cache = hfpaged.PagedCache(model, block_size=BLOCK_SIZE, memory="1MiB")
    cache.pool.load_prefixes(saved)
    assert same_as_plain(model, cache, prompts([37])) >= 36
    assert cache.stats().bytes_reserved <= 2**20
    default = hfpaged.PagedCache(model, block_size=BLOCK_SIZE)
    assert default.pool.load_prefixes(saved).left_out == 0
    assert default.pool.blocks.max_cached is not None
    tiny = hfpaged.PagedCache(model, block_size=BLOCK_SIZE, memory=10)
    with pytest.raises(InvalidConfigError, match="Give more memory"):
        tiny.pool.load_prefixes(saved)
    tiny.pool.check_integrity()


def test_a_default_pool_loads_no_more_than_it_may_keep_cached(saved):
    pool = cache_of(shared("llama")).pool
    pool.blocks.max_cached = 4
    loaded = pool.load_prefixes(saved)
    assert (loaded.blocks, len(pool.blocks.cached)) == (4, 4)
    pool.check_integrity()


def test_salts_stay_apart_and_stand_in_no_file(tmp_path):
    model, inputs = shared("llama"), prompts([37])
    pool = cache_of(model).pool
    for salt in ("tenant-secret", None):
        cache = cache_of(model, pool=pool, salt=salt)
        generate(model, cache, inputs)
        cache.free()
    del cache
    pool.save_prefixes(tmp_path / "p")
    assert b"tenant-secret" not in (tmp_path / "p").read_bytes()
    for salt, hits in (("tenant-secret", True), ("tenant-other", False), (None, True)):
        cache = cache_of(model, salt=salt)
        cache.pool.load_prefixes(tmp_path / "p")
        assert bool(same_as_plain(model, cache, inputs)) == hits


def test_prefixes_of_embeddings_are_saved_with_their_five_numbers(tmp_path):
    model = shared("llama")
    inputs = {"inputs_embeds": model.get_input_embeddings()(prompts([37])["input_ids"])}
    pool = warm(model, inputs)
    assert [root.width for root in pool.prefixes.index.roots] == [5]
    pool.save_prefixes(tmp_path / "p")
    cache = cache_of(model)
    cache.pool.load_prefixes(tmp_path / "p")
    assert [root.width for root in cache.pool.prefixes.index.roots] == [5]
    assert same_as_plain(model, cache, inputs) >= 32
    assert same_as_plain(model, cache, prompts([37])) == cache.stats().prefix_hits


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 0.9999])
def test_a_truncated_file_is_never_loaded(share, saved, tmp_path):
    raw = saved.read_bytes()
    (tmp_path / "p").write_bytes(raw[: int(len(raw) * share)])
    refused(cache_of(shared("llama")).pool, tmp_path / "p", "truncated")


def regions(raw):
    """Places in a file by what stands there."""
    length = struct.unpack("<Q", raw[:8])[0]
    header, body = range(8, 8 + length), range(8 + length, len(raw))
    digest = raw.index(b'"sha256": "') + 11
    manifest = raw.index(b'"manifest"')
    end = raw.index(b'"tree.roots"')
    tree_bytes = json.loads(raw[8 : 8 + length])["layer.0.key"]["data_offsets"][0]
    return {
        "length": range(8),
        "digest": range(digest, digest + 64),
        "manifest": range(manifest, end),
        "header": header,
        "end of header": range(8 + length - 16, 8 + length),
        "trees": body[:tree_bytes],
        "keys": body[tree_bytes:],
    }


@pytest.mark.parametrize("region", ["length", "digest", "manifest", "header", "end of header", "trees", "keys"])
def test_a_file_with_one_byte_changed_is_never_loaded(region, saved, tmp_path):
    raw = saved.read_bytes()
    pool = cache_of(shared("llama")).pool
    chooser = random.Random(region)
    places = regions(raw)[region]
    for place in {places[0], places[-1], *chooser.sample(places, min(24, len(places)))}:
        changed = bytearray(raw)
        changed[place] ^= chooser.randint(1, 255)
        (tmp_path / "p").write_bytes(changed)
        refused(pool, tmp_path / "p", "changed")
    (tmp_path / "p").write_bytes(raw)
    assert pool.load_prefixes(tmp_path / "p").blocks


def test_bytes_behind_the_end_and_other_files_are_refused(saved, tmp_path):
    pool = cache_of(shared("llama")).pool
    (tmp_path / "longer").write_bytes(saved.read_bytes() + b"\0")
    refused(pool, tmp_path / "longer", "truncated or changed")
    (tmp_path / "other").write_bytes(b"PK\3\4" + bytes(5000))
    refused(pool, tmp_path / "other", "written by something else")
    with pytest.raises(FileNotFoundError):
        pool.load_prefixes(tmp_path / "nothing")


def test_other_weights_and_other_configs_are_refused_with_both_fingerprints(saved):
    weights = make("llama")
    with torch.no_grad():
        next(weights.parameters()).mul_(1.01)
    for other in (weights, make("llama", rms_norm_eps=1e-4), make("llama").to(torch.bfloat16)):
        words = refused(cache_of(other).pool, saved, "model fingerprint [0-9a-f]{12}.*has [0-9a-f]{12}")
        assert "now" not in words  # the same library versions
    same = make("llama")
    assert cache_of(same).pool.load_prefixes(saved).blocks


def test_the_message_names_library_versions_that_differ(saved, monkeypatch):
    now = prefix_manifest.installed_versions() | {"transformers": "5.99.0"}
    monkeypatch.setattr(prefix_loading, "installed_versions", lambda: now)
    model = make("llama", rms_norm_eps=1e-4)
    refused(cache_of(model).pool, saved, r"transformers 5\.\S+ \(now 5\.99\.0\)")


def test_other_block_sizes_formats_and_layer_groups_are_refused(saved):
    model = shared("llama")
    refused(hfpaged.PagedCache(model, num_blocks=64, block_size=8).pool, saved, "block size of 4, this one has 8")
    refused(cache_of(model, kv_dtype="bfloat16").pool, saved, "KV format of auto, this one has bfloat16")
    refused(cache_of(shared("gemma2")).pool, saved, "layer groups of full attention: layers 0, 1, this one has")


def test_a_pool_without_a_model_cannot_tell_whose_keys_they_are(saved):
    refused(hfpaged.PagedCache(config=shared("llama").config, block_size=4).pool, saved, r"PagedCache\(model\)")


def test_a_pool_does_not_keep_its_model_alive(saved):
    model = make("llama")
    pool = cache_of(model).pool
    del model
    gc.collect()
    assert not pool.models
    refused(pool, saved, "model is gone")


def test_other_shapes_are_refused(saved):
    model = shared("llama")
    pool = cache_of(model).pool
    store = pool.storage.store(0, *(torch.zeros(1, 3, 1, 12) for _ in range(2)), layer=0)
    pool.settle_size(0, store)
    refused(pool, saved, "of another model")


def test_a_converted_format_is_kept_as_it_is(tmp_path):
    model, inputs = shared("llama"), prompts([37])
    pool = warm(model, inputs, kv_dtype="bfloat16")
    pool.save_prefixes(tmp_path / "p")
    assert load_file(tmp_path / "p")["layer.1.value"].dtype == torch.bfloat16
    cache = cache_of(model, kv_dtype="bfloat16")
    cache.pool.load_prefixes(tmp_path / "p")
    again = cache_of(model, pool=pool)
    expected = generate(model, again, inputs)
    output = generate(model, cache, inputs)
    assert cache.stats().prefix_hits >= 36
    assert torch.equal(output.sequences, expected.sequences)
    assert all(torch.equal(*pair) for pair in zip(output.logits, expected.logits, strict=True))


def test_blocks_of_a_model_that_is_not_on_the_pool_are_left_out(tmp_path):
    first, second = make("llama"), make("llama", rms_norm_eps=1e-4)
    pool = warm(first)
    cache = cache_of(second, pool=pool)
    generate(second, cache, prompts([37]))
    cache.free()
    done = pool.save_prefixes(tmp_path / "p")
    new = cache_of(second)
    loaded = new.pool.load_prefixes(tmp_path / "p")
    assert loaded.blocks == loaded.other_models == done.blocks // 2
    assert same_as_plain(second, new, prompts([37])) >= 36


def test_a_pool_with_two_kinds_of_keys_cannot_be_saved(tmp_path):
    model = shared("llama")
    pool = warm(model)
    with torch.autocast("cpu", torch.bfloat16):
        cache = cache_of(model, pool=pool)
        generate(model, cache, prompts([37]))
    with pytest.raises(PrefixFileError, match="2 kinds of keys"):
        pool.save_prefixes(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_a_crash_while_writing_leaves_what_was_there(saved, tmp_path, monkeypatch):
    pool = warm(shared("llama"))
    path = tmp_path / "p"
    path.write_bytes(saved.read_bytes())
    before = state(pool)

    def crash(*arguments):
        raise OSError("the disk is gone")

    for module, name in ((tensor_file.os, "replace"), (tensor_file.os, "fsync"), (tensor_file, "_write")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, crash)
            with pytest.raises(OSError, match="disk is gone"):
                pool.save_prefixes(path)
        assert [file.name for file in tmp_path.iterdir()] == ["p"]
        assert path.read_bytes() == saved.read_bytes()
        assert state(pool) == before
    assert pool.save_prefixes(path).blocks
    assert cache_of(shared("llama")).pool.load_prefixes(path).blocks


def test_a_failure_while_loading_gives_all_blocks_back(saved, monkeypatch):
    pool = cache_of(shared("llama")).pool

    def crash(*arguments):
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(hfpaged.kv_storage.LayerStore, "fill", crash)
        with pytest.raises(MemoryError):
            pool.load_prefixes(saved)
    pool.check_integrity()
    assert (pool.num_free, pool.stats().blocks_cached, pool.prefixes.index.roots) == (64, 0, [])
    assert pool.load_prefixes(saved).blocks


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed_up(saved, tmp_path, monkeypatch):
    path = tmp_path / "p"
    path.write_bytes(saved.read_bytes())
    check = tensor_file._check_digest

    def check_and_replace(file, *what):
        check(file, *what)
        (tmp_path / "new").write_bytes(b"unchecked")
        (tmp_path / "new").write_bytes(saved.read_bytes())
        os.replace(tmp_path / "new", path)

    monkeypatch.setattr(tensor_file, "_check_digest", check_and_replace)
    refused(cache_of(shared("llama")).pool, path, "was replaced while it was read")


def forged(source, path, change):
    """The file with its tensors and manifest changed, under a digest that is right."""
    tensors = load_file(source)
    raw = source.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    manifest = json.loads(header["__metadata__"]["manifest"])
    change(manifest, tensors)
    specs = [tensor_file.TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    tensor_file.write_file(path, json.dumps(manifest), specs, tensors.values())


FORGERIES = {
    "format": (lambda m, t: m.update(format=99), "format is number 99"),
    "no groups": (lambda m, t: m.pop("groups"), "cannot be understood"),
    "dtype": (lambda m, t: m["layers"]["0"].update(key_dtype="load"), "unknown dtype|cannot be understood"),
    "parents": (lambda m, t: t["tree.parents"].__setitem__(0, 0), "before the one that it follows"),
    "roots": (lambda m, t: t["tree.roots"].__setitem__(0, 7), "no root"),
    "order": (lambda m, t: t["tree.order"].__setitem__(0, torch.tensor([999, 0])), "not there"),
    "twice": (lambda m, t: t["tree.order"].__setitem__(0, t["tree.order"][1]), "twice"),
    "tokens": (lambda m, t: t.update({"tree.tokens": t["tree.tokens"][:-1].clone()}), "token numbers"),
    "layer": (lambda m, t: t.pop("layer.1.key"), "layer.1.key"),
    "shape": (lambda m, t: t.update({"layer.1.key": t["layer.1.key"][:, :1].clone()}), "layer.1.key"),
    "stored": (lambda m, t: t.update({"layer.1.key": t["layer.1.key"].half()}), "layer.1.key"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_file_with_a_right_digest_and_wrong_contents_is_refused(case, saved, tmp_path):
    change, words = FORGERIES[case]
    forged(saved, tmp_path / "p", change)
    refused(cache_of(shared("llama")).pool, tmp_path / "p", words)


def test_blocks_behind_one_that_is_missing_are_not_saved(tmp_path):
    model = shared("llama")
    pool = warm(model)
    (first,) = pool.prefixes.index.roots[0].children.values()
    (block,) = first.blocks
    with pool.changing():
        pool.blocks.acquire(block)
        pool.prefixes.withdraw([block])
        pool.blocks.release(block)
    pool.check_integrity()
    assert pool.blocks.num_cached > 5
    assert pool.save_prefixes(tmp_path / "p").blocks == 0


def test_no_salt_is_kept_in_clear_by_the_index():
    model = shared("llama")
    cache = cache_of(model, salt="tenant-secret")
    generate(model, cache, prompts([20]))
    (root,) = cache.pool.prefixes.index.roots
    assert "tenant-secret" not in repr(root.keys)
    assert ExtraKey("device", "cpu") in root.keys
