"""The files of a prefix store: right or not there, whoever writes, kills, cuts or changes them."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import struct
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_store_blocks import BLOCK_SIZE, GROUPS, KEYS, KIND, addresses, contents, facts, layers, root
from safetensors.torch import load_file
from waiting import wait_until

from hfpaged import prefix_store, prefix_store_folder, tensor_file
from hfpaged.block_hash import ExtraKey
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import resolve_format
from hfpaged.prefix_manifest import LayerKind
from hfpaged.prefix_store import PrefixStore
from hfpaged.prefix_store_folder import StoreFolder

WORKER = Path(__file__).with_name("prefix_store_worker.py")
LIMIT = 2**20


@pytest.fixture
def store(tmp_path):
    return PrefixStore(tmp_path / "store", facts(), LIMIT)


def put(store, address, group=0):
    return store.put(address, group, layers(group), contents(address, group))


def is_right(store, address, group=0):
    """Whether a block is there; it must be the one that was written then."""
    found = store.get(address, group)
    if found is None:
        return False
    assert found.layers == layers(group)
    assert all(torch.equal(*pair) for pair in zip(found.parts, contents(address, group), strict=True))
    return True


def files(store):
    return sorted(store.folder.path.iterdir())


def test_what_was_written_is_read_by_another_service(store):
    chain = addresses(1, 3)
    for address in chain:
        for group in (0, 1):
            assert not store.has(address, group)
            assert put(store, address, group)
    other = PrefixStore(store.folder.path, facts(), LIMIT)
    assert all(is_right(other, address, group) for address in chain for group in (0, 1))
    assert other.counts.read == store.counts.written == 6
    assert other.folder.num_bytes == sum(file.stat().st_size for file in files(store)) == store.counts.bytes_written
    assert other.counts.bytes_read == store.counts.bytes_written
    assert put(store, chain[0])
    assert store.counts.written == 6  # it was there
    assert not is_right(other, addresses(2, 1)[0])
    assert other.counts.damaged == other.counts.failed == 0


@pytest.mark.parametrize("name", ["bfloat16", "int8", "fp8_e4m3", "int4", "k8v4"])
def test_every_kv_format_comes_back_byte_for_byte(name, tmp_path):
    own = facts(kv_format=resolve_format(name), block_size=16)
    store, kind = PrefixStore(tmp_path, own, LIMIT), LayerKind(2, 32, 32, "float16", "float16")
    (address,) = addresses(1, 1, own)
    parts = contents(address, 1, own, kind)
    assert store.put(address, 1, layers(1, kind), parts)
    found = store.get(address, 1)
    assert all(torch.equal(*pair) for pair in zip(found.parts, parts, strict=True))


def test_a_file_is_a_plain_safetensors_file_that_only_its_owner_reads(store):
    first, second = addresses(1, 2)
    put(store, first)
    put(store, second)
    assert store.folder.path.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in files(store)] == [0o600, 0o600]
    tensors = load_file(store.folder.file(second.name(0)))
    assert tensors["tree.tokens"].tolist() == list(second.items)
    assert tensors["layer.2.value"].shape == (1, 2, BLOCK_SIZE, 4)


OTHERS = {
    "tokens": (addresses(2, 1)[0], facts()),
    "tokens before": (replace(addresses(2, 2)[1], items=addresses(1, 1)[0].items), facts()),
    "model": (addresses(1, 1, own_root=root((ExtraKey("model", "0" * 64), *KEYS[1:])))[0], facts()),
    "salt": (addresses(1, 1, own_root=root((KEYS[0], ExtraKey("salt", "e" * 64), KEYS[2])))[0], facts()),
    "no salt": (addresses(1, 1, own_root=root((KEYS[0], KEYS[2])))[0], facts()),
    "rank": (addresses(1, 1, own_root=root((*KEYS, ExtraKey("rank", "rank 1 of 2"))))[0], facts()),
    "adapter": (addresses(1, 1, own_root=root((*KEYS, ExtraKey("adapter", "a"))))[0], facts()),
} | {
    name: (addresses(1, 1, facts(**{name: value}))[0], facts(**{name: value}))
    for name, value in (
        ("kv_format", resolve_format("int8")), ("groups", GROUPS[:1]), ("block_size", 8)
    )
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_belongs_to_others_is_never_found(case, store):
    (address,) = addresses(1, 1)
    put(store, address)
    other, own_facts = OTHERS[case]
    others = PrefixStore(store.folder.path, own_facts, LIMIT)
    assert other.digest != address.digest
    assert others.get(other, 0) is None
    assert others.counts.damaged == 0
    # nor under a name that is wrong: as if two had one hash
    os.replace(store.folder.file(address.name(0)), store.folder.file(other.name(0)))
    assert others.get(other, 0) is None
    assert others.counts.damaged == 1


def test_the_tokens_are_compared(store):
    (address,) = addresses(1, 1)
    put(store, address)
    assert store.get(replace(address, items=addresses(2, 1)[0].items), 0) is None
    assert store.counts.damaged == 1


def test_another_device_is_no_other_prefix_and_hooks_are_never_stored(store):
    other = root((*KEYS[:2], ExtraKey("device", "cuda:1")))
    assert addresses(1, 3, own_root=other) == addresses(1, 3)
    assert addresses(1, 3, own_root=root((*KEYS, ExtraKey("hook", "0.1")))) == []


def refused(store, address, caplog):
    """A file is not used, said so once at most, and gone."""
    before = store.counts.damaged
    assert store.get(address, 0) is None
    assert store.counts.damaged == before + 1
    assert not store.has(address, 0)
    assert len([record for record in caplog.records if "is not used and removed" in record.message]) == 1


def test_a_file_with_a_bit_flipped_is_never_used(store, caplog):
    (address,) = addresses(1, 1)
    put(store, address)
    path = store.folder.file(address.name(0))
    raw, chooser = path.read_bytes(), random.Random(1)
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    for part in (range(8), range(8, 120), range(120, header), range(header, len(raw))):
        for place in {part[0], part[-1], *chooser.sample(part, min(len(part), 24))}:
            changed = bytearray(raw)
            changed[place] ^= 1 << chooser.randrange(8)
            path.write_bytes(changed)
            refused(store, address, caplog)
    path.write_bytes(raw)
    assert is_right(store, address)


def test_a_file_that_was_cut_or_went_on_is_never_used(store, caplog):
    (address,) = addresses(1, 1)
    put(store, address)
    path = store.folder.file(address.name(0))
    raw = path.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    ends = [0, 1, 7, 8, 9, 40, 100, 101, header - 1, header, header + 1, len(raw) // 2, len(raw) - 1]
    for cut in [*(raw[:end] for end in ends), raw + b"\0", bytes(len(raw)), b"PK\3\4" + bytes(5000)]:
        path.write_bytes(cut)
        refused(store, address, caplog)
    path.write_bytes(raw)
    assert is_right(store, address)


def test_swapped_files_are_never_used(store):
    first, second = addresses(1, 2)
    for address in (first, second):
        for group in (0, 1):
            put(store, address, group)

    def swap(one, two):
        paths = [store.folder.file(name) for name in (one, two)]
        os.rename(paths[0], paths[0].with_suffix(".x"))
        os.rename(paths[1], paths[0])
        os.rename(paths[0].with_suffix(".x"), paths[1])

    swap(first.name(0), second.name(0))
    swap(first.name(1), second.name(1))
    assert [store.get(address, group) for address in (first, second) for group in (0, 1)] == [None] * 4
    put(store, first, 0)
    put(store, first, 1)
    swap(first.name(0), first.name(1))
    assert [store.get(first, group) for group in (0, 1)] == [None] * 2
    assert store.counts.damaged == 6


@pytest.mark.parametrize("change", ["format", "infinite", "tokens", "shape", "missing"])
def test_a_file_with_a_right_digest_and_wrong_contents_is_never_used(change, store, caplog):
    (address,) = addresses(1, 1)
    put(store, address)
    path = store.folder.file(address.name(0))
    raw = path.read_bytes()
    manifest = json.loads(json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])["__metadata__"]["manifest"])
    tensors = load_file(path)
    if change == "format":
        manifest["format"] += 1
    elif change == "infinite":
        manifest["block_size"] = float("inf")
    elif change == "tokens":
        tensors["tree.tokens"][2] += 1
    elif change == "shape":
        tensors["layer.0.key"] = tensors["layer.0.key"].reshape(1, 2, BLOCK_SIZE // 2, -1).clone()
    else:
        del tensors["layer.2.value"]
    specs = [tensor_file.TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    tensor_file.write_file(path, json.dumps(manifest), specs, tensors.values())
    refused(store, address, caplog)


def test_what_is_no_regular_file_is_not_opened_for_ever(store, tmp_path):
    address, other = addresses(1, 2)
    put(store, other)
    os.mkfifo(store.folder.file(address.name(0)))
    assert store.get(address, 0) is None
    (tmp_path / "elsewhere").write_bytes(store.folder.file(other.name(0)).read_bytes())
    os.unlink(store.folder.file(other.name(0)))
    os.symlink(tmp_path / "elsewhere", store.folder.file(other.name(0)))
    assert store.get(other, 0) is None
    assert (store.counts.damaged, store.counts.failed) == (1, 1)
    assert (tmp_path / "elsewhere").exists()


def size_on_disk(path):
    total = 0
    for file in path.iterdir():
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


def test_the_bound_is_held_and_the_least_recently_used_go_first(store):
    chains = [addresses(seed, 12) for seed in range(90)]
    now = iter(range(10**9, 2 * 10**9))
    store.folder._clock = lambda: next(now)
    for chain in chains:
        for address in chain:
            put(store, address)
        for address in chains[0]:
            assert store.use(address, 0)
        assert size_on_disk(store.folder.path) <= LIMIT
    store.folder.look()
    assert store.folder.num_bytes == size_on_disk(store.folder.path) > LIMIT // 2
    there = [sum(store.has(address, 0) for address in chain) for chain in chains]
    assert there[0] == there[-1] == 12
    assert there[1] == 0
    assert store.folder.num_removed == store.counts.written - sum(there)


def test_what_was_written_before_the_clock_was_set_back_goes_first(store):
    before, after = addresses(1, 40), addresses(2, 40)
    store.folder._clock = lambda: time.time() + 10**6
    for address in before:
        put(store, address)
    store.folder._clock = time.time
    for address in after:
        put(store, address)
    abandoned = store.folder.path / ".hfpaged-x.tmp"
    abandoned.write_bytes(b"x")
    os.utime(abandoned, (time.time() + 10**6,) * 2)
    store.folder.limit = size_on_disk(store.folder.path) * 3 // 4
    store.folder.look()
    assert all(store.has(address, 0) for address in after)
    assert sum(store.has(address, 0) for address in before) < 40
    assert not abandoned.exists()


def test_the_end_of_a_prefix_goes_before_its_beginning(store):
    long = addresses(1, 100)
    for address in long:
        put(store, address)
    per_file = size_on_disk(store.folder.path) // 100
    store.folder.limit = per_file * 60
    store.folder.look()
    there = [store.has(address, 0) for address in long]
    assert there == sorted(there, reverse=True)
    assert 45 < sum(there) <= 60


def test_several_services_together_stay_below_the_bound(tmp_path):
    stores = [PrefixStore(tmp_path, facts(), LIMIT) for _ in range(4)]
    most = []

    def write(number, store):
        for seed in range(40):
            for address in addresses(1000 * number + seed, 4):
                put(store, address)
            most.append(size_on_disk(tmp_path))

    threads = [threading.Thread(target=write, args=pair) for pair in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert LIMIT // 2 < max(most) <= LIMIT
    assert sum(store.counts.dropped for store in stores) == 0


def test_a_block_larger_than_the_store_is_dropped(store):
    store.folder.limit = 1000
    assert not put(store, addresses(1, 1)[0])
    assert store.counts.dropped == 1
    assert files(store) == []


def test_files_of_others_in_the_directory_stay(tmp_path):
    (tmp_path / "notes.txt").write_bytes(bytes(2 * LIMIT))
    (tmp_path / ("0" * 64)).write_bytes(bytes(2 * LIMIT))
    store = PrefixStore(tmp_path, facts(), LIMIT)
    put(store, addresses(1, 1)[0])
    store.folder.look()
    assert store.folder.num_files == 1
    assert {"notes.txt", "0" * 64} < {file.name for file in files(store)}


def test_what_a_killed_writer_left_behind_is_removed_later(store):
    young, old = store.folder.path / ".hfpaged-a.tmp", store.folder.path / ".hfpaged-b.tmp"
    for path in (young, old):
        path.write_bytes(bytes(1000))
    long_ago = time.time() - prefix_store_folder.ABANDONED_SECONDS - 1
    os.utime(old, (long_ago, long_ago))
    store.folder.look()
    assert files(store) == [young]
    assert (store.folder.num_files, store.folder.num_bytes) == (0, 1000)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(error, store, caplog, monkeypatch):
    chain = addresses(1, 4)
    put(store, chain[0])
    attempts = []

    def fail(*arguments, **options):
        attempts.append(arguments)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(prefix_store, "write_file", fail)
        assert not any(put(store, address) for address in chain[1:])
    assert len(attempts) == 1
    assert store.is_resting
    assert store.counts.dropped == 3
    assert is_right(store, chain[0])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    store._rests_until = 0.0
    assert all(put(store, address) for address in chain)


LIMITED = """
import resource, sys
from prefix_store_blocks import *
from hfpaged.prefix_manifest import LayerKind
from hfpaged.prefix_store import PrefixStore
store = PrefixStore(sys.argv[1], facts(), 2**20)
first, second, third = addresses(1, 3)
def put(address):
    return store.put(address, 0, layers(0), contents(address, 0))
assert put(first)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
assert not put(second)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store._rests_until = 0.0
assert put(third)
assert store.get(first, 0) and store.get(third, 0) and not store.get(second, 0)
"""

READ_ONLY = """
import os, sys
from prefix_store_blocks import *
from hfpaged.prefix_manifest import LayerKind
from hfpaged.prefix_store import PrefixStore
first, second = addresses(1, 2)
def put(store, address):
    return store.put(address, 0, layers(0), contents(address, 0))
assert put(PrefixStore(sys.argv[1], facts(), 2**20), first)
os.chmod(sys.argv[1], 0o555)
if os.geteuid() == 0:
    os.chown(store_file := PrefixStore(sys.argv[1], facts(), 2**20).folder.file(first.name(0)), 65534, -1)
    os.chmod(os.path.dirname(sys.argv[1]), 0o755)
    os.seteuid(65534)
store = PrefixStore(sys.argv[1], facts(), 2**20)
assert not put(store, second)
assert store.get(first, 0)
assert store.counts.dropped == 1 and not os.path.exists(store.folder.file(second.name(0)))
"""


@pytest.mark.parametrize("script", [LIMITED, READ_ONLY], ids=["full", "read only"])
def test_a_real_disk_that_takes_nothing_fails_nobody(script, tmp_path):
    code, said = tmp_path / "script.py", tmp_path / "said"
    code.write_text(script)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to a user who is not their owner
        os.chmod(folder, 0o755)
        store = Path(folder) / "store"
        process = forked.start([str(code), str(store)], forked.shared_environment(), said)
        assert process.wait(120) == 0, said.read_text()
        assert said.read_text().count("cannot be written") == 1
        assert not list(store.glob("*.tmp"))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_into_which_others_write_is_refused(mode, tmp_path):
    tmp_path.chmod(mode)
    with pytest.raises(InvalidConfigError, match=f"mode {mode:03o}.*chmod 700"):
        PrefixStore(tmp_path, facts(), LIMIT)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(InvalidConfigError, match="belongs to user 65534, and this is user 0"):
        PrefixStore(tmp_path, facts(), LIMIT)


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidConfigError, match="no directory"):
        PrefixStore(tmp_path / "file", facts(), LIMIT)
    with pytest.raises(InvalidConfigError, match="at least 1 MiB"):
        PrefixStore(tmp_path / "store", facts(), 1000)


def test_a_writer_that_is_killed_at_any_moment_leaves_no_wrong_block(tmp_path):
    chooser, path = random.Random(5), tmp_path / "store"
    for number in range(3):
        words, said = [str(WORKER), str(path), str(1000 * number), str(LIMIT)], tmp_path / str(number)
        writer = forked.start(words, forked.shared_environment(), said)
        wait_until(lambda said=said: said.read_text() == "ready\n", 120)
        time.sleep(chooser.uniform(0.05, 0.5))
        writer.kill()
        assert writer.wait(30) == -signal.SIGKILL
    store = PrefixStore(path, facts(), LIMIT)
    names = [file.stem.split("-") for file in path.glob("*.safetensors")]
    assert len(names) > 20
    known, chains = {}, (addresses(1000 * number + chain, 8) for chain in range(999) for number in range(3))
    while not {digest for digest, _ in names} <= known.keys():
        known |= {address.digest: address for address in next(chains)}
    assert all(is_right(store, known[digest], int(group)) for digest, group in names)
    assert store.counts.damaged == 0
    assert size_on_disk(path) <= LIMIT


ACTIONS = st.tuples(st.sampled_from(["put", "get", "use", "remove", "look"]), st.integers(0, 7))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, max_size=60), num_threads=st.integers(2, 4))
def test_threads_that_write_read_and_remove_at_once_never_see_a_wrong_block(actions, num_threads, tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    chain, wrong = addresses(3, 8), []

    def act(shift):
        store = PrefixStore(path, facts(), LIMIT)
        store.folder.limit = 20_000
        for what, number in actions[shift:] + actions[:shift]:
            try:
                if what == "put":
                    put(store, chain[number])
                elif what == "get":
                    is_right(store, chain[number])
                elif what == "look":
                    store.folder.look(2000)
                else:
                    getattr(store.folder, "touch" if what == "use" else what)(chain[number].name(0))
            except BaseException as error:
                wrong.append(error)
        if store.counts.damaged or store.counts.failed:
            wrong.append(store.counts)

    threads = [threading.Thread(target=act, args=(7 * number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_looking_at_a_directory_that_is_gone_raises_nothing_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr(StoreFolder, "look", lambda self: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert PrefixStore(tmp_path, facts(), LIMIT).folder.num_files == 0


def test_a_kind_of_layer_is_told_to_who_reads(store):
    (address,) = addresses(1, 1)
    put(store, address)
    assert dict(store.get(address, 0).layers) == {0: KIND, 2: KIND}
