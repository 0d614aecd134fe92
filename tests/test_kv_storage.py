from __future__ import annotations

import threading

import pytest
import torch

from hfpaged.block_table import BlockCopy
from hfpaged.errors import CacheMismatchError
from hfpaged.kv_format import FORMATS
from hfpaged.kv_storage import GROWTH, KVStorage, LayerStore, check_signature
from hfpaged.step import Step

HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE = 2, 8, 4, 4


def states(length=1, heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM, dtype=torch.float32, batch=1):
    """Keys and values as a model brings them: [batch, num_kv_heads, length, dim]."""
    return (
        torch.randn(batch, heads, length, key_dim).to(dtype),
        torch.randn(batch, heads, length, value_dim).to(dtype),
    )


def flat(t):
    return t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3])


def store_of(kv_format="auto", **kwargs):
    return LayerStore(*states(**kwargs), BLOCK_SIZE, FORMATS[kv_format])


def step_to(slots):
    """A step whose tokens go to these slots; writing looks at nothing else."""
    nothing = torch.zeros(0, dtype=torch.int32)
    return Step(torch.tensor(slots), *[nothing] * 4, 0, False, False, True)


def read(cache, slots):
    return torch.stack([cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] for slot in slots])


def write(store, slots):
    """Random tokens at the slots; returns what was written."""
    key, value = (flat(t) for t in states(len(slots)))
    store.write(key, value, step_to(slots))
    return key, value


def assert_holds(store, slots, key, value):
    torch.testing.assert_close(read(store.key, slots), key.to(store.key.dtype), rtol=0, atol=0)
    torch.testing.assert_close(read(store.value, slots), value.to(store.value.dtype), rtol=0, atol=0)


def test_a_new_store_takes_no_memory_and_knows_the_bytes_of_a_block():
    store = store_of()
    assert store.nbytes == 0
    assert store.key.shape == (0, HEADS, BLOCK_SIZE, KEY_DIM)
    assert store.value.shape == (0, HEADS, BLOCK_SIZE, VALUE_DIM)
    assert store.block_bytes == BLOCK_SIZE * HEADS * (KEY_DIM + VALUE_DIM) * 4


@pytest.mark.parametrize("needed", [1, 3, 8, 80])
def test_reserving_holds_what_is_needed_and_a_little_more_in_advance(needed):
    store = store_of()
    store.reserve(needed, limit=1000)
    assert needed <= len(store.key) <= needed * GROWTH
    assert len(store.value) == len(store.key)
    assert store.nbytes == len(store.key) * store.block_bytes
    if needed >= 8:
        assert len(store.key) > needed


def test_reserving_stops_at_the_limit_of_the_pool():
    store = store_of()
    store.reserve(98, limit=100)
    assert len(store.key) == 100
    store.reserve(100, limit=100)
    assert len(store.key) == 100


def test_reserving_less_than_there_is_changes_nothing():
    store = store_of()
    store.reserve(16, limit=100)
    key, value = store.key, store.value
    store.reserve(5, limit=100)
    store.reserve(int(16 * GROWTH), limit=100)
    assert store.key is key
    assert store.value is value


def test_what_is_stored_stays_when_the_store_grows():
    store = store_of()
    store.reserve(2, limit=100)
    slots = [7, 0, 3, 5, 4]
    key, value = write(store, slots)
    for needed in (3, 10, 100):
        store.reserve(needed, limit=100)
        assert_holds(store, slots, key, value)


def test_tokens_lie_at_their_slots_and_minus_one_is_not_stored():
    store = store_of()
    store.reserve(3, limit=3)
    store.key.fill_(7)
    store.value.fill_(7)
    slots = [9, -1, 2, -1, 5]
    key, value = write(store, slots)
    kept = [0, 2, 4]
    assert_holds(store, [9, 2, 5], key[kept], value[kept])
    others = [slot for slot in range(3 * BLOCK_SIZE) if slot not in slots]
    assert (read(store.key, others) == 7).all()
    assert (read(store.value, others) == 7).all()


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "float16", "auto"])
def test_the_format_says_how_tokens_are_stored(kv_format, computed):
    store = store_of(kv_format, dtype=computed)
    stored = computed if kv_format == "auto" else FORMATS[kv_format].key
    assert store.key.dtype == store.value.dtype == stored
    assert store.block_bytes == BLOCK_SIZE * HEADS * (KEY_DIM + VALUE_DIM) * stored.itemsize
    store.reserve(1, limit=4)
    assert store.key.dtype == stored
    key, value = (flat(t) for t in states(2, dtype=computed))
    store.write(key, value, step_to([2, 1]))
    assert_holds(store, [2, 1], key, value)


def test_copied_blocks_are_whole_and_their_sources_stay():
    store = store_of()
    store.reserve(4, limit=4)
    key, value = write(store, list(range(2 * BLOCK_SIZE)))
    store.copy_blocks([BlockCopy(source=0, target=3), BlockCopy(source=1, target=2)])
    assert_holds(store, list(range(2 * BLOCK_SIZE)), key, value)
    assert_holds(store, [12, 13, 14, 15, 8, 9, 10, 11], key, value)


def test_one_block_can_be_copied_to_several():
    store = store_of()
    store.reserve(4, limit=4)
    key, value = write(store, list(range(4)))
    store.copy_blocks([BlockCopy(0, target) for target in (1, 2, 3)])
    for block in range(4):
        assert_holds(store, [block * BLOCK_SIZE + offset for offset in range(4)], key, value)


def test_one_thread_that_writes_and_one_that_grows_lose_nothing():
    store = store_of()
    store.reserve(64, limit=4096)
    written, errors = {}, []

    def write_all():
        try:
            for slot in range(64 * BLOCK_SIZE):
                written[slot] = write(store, [slot])
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=write_all)
    thread.start()
    needed = 65
    while thread.is_alive():
        needed = min(needed + 16, 4096)
        store.reserve(needed, limit=4096)
    thread.join()
    assert not errors
    assert len(written) == 64 * BLOCK_SIZE
    assert len(store.key) > 64
    for slot, (key, value) in written.items():
        assert_holds(store, [slot], key, value)


def test_growing_waits_while_somebody_writes():
    store = store_of()
    store.reserve(2, limit=100)
    old = store.key
    grower = threading.Thread(target=store.reserve, args=(50, 100))
    with store._lock:  # what write() and copy_blocks() hold
        grower.start()
        grower.join(timeout=0.1)
        assert grower.is_alive()
        assert store.key is old
        old[1, :, 2] = 42
    grower.join(timeout=10)
    assert len(store.key) >= 50
    assert (store.key[1, :, 2] == 42).all()


def test_a_store_that_waited_while_another_thread_grew_it_further_stays_as_large():
    store, errors = store_of(), []

    def reserve_few():
        try:
            store.reserve(10, limit=1000)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=reserve_few)
    with store._lock:
        thread.start()
        thread.join(timeout=0.2)  # it has seen that there are 0 blocks, and waits
        assert thread.is_alive()
        for part in (store._key, store._value):
            part.grow(125, 0)  # what reserve(112) does in another thread
    thread.join(timeout=10)
    assert not errors
    assert (len(store.key), len(store.value)) == (125, 125)


@pytest.mark.parametrize("made_in", [True, False])
def test_a_store_made_in_inference_mode_is_writable_outside_and_the_other_way_round(made_in):
    with torch.inference_mode(made_in):
        store = store_of()
        store.reserve(1, limit=10)
        first = write(store, [0])
    with torch.inference_mode(not made_in):
        second = write(store, [1])
        store.reserve(2, limit=10)  # grown in the other mode as well
        store.copy_blocks([BlockCopy(0, 1)])
        third = write(store, [6])
    with torch.inference_mode(made_in):
        store.reserve(9, limit=10)
        fourth = write(store, [35])
    assert not store.key.is_inference()
    assert not store.value.is_inference()
    for slot, tokens in ((0, first), (1, second), (4, first), (5, second), (6, third), (35, fourth)):
        assert_holds(store, [slot], *tokens)


def test_groups_share_the_store_of_a_place_when_shapes_are_equal():
    storage = KVStorage(BLOCK_SIZE, FORMATS["auto"])
    first = storage.store(0, *states(3), layer=0)
    assert storage.store(0, *states(1), layer=0) is first
    assert storage.store(0, *states(5, batch=4), layer=0) is first  # neither length nor batch belongs to the kind
    assert storage.store(1, *states(3), layer=0) is not first
    assert storage.block_bytes == 2 * first.block_bytes


OTHERS = [
    {"heads": HEADS + 1},
    {"key_dim": KEY_DIM * 2},
    {"value_dim": VALUE_DIM * 2},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_layers_of_another_kind_have_a_store_of_their_own(other):
    storage = KVStorage(BLOCK_SIZE, FORMATS["auto"])
    first = storage.store(0, *states(), layer=0)
    second = storage.store(0, *states(**other), layer=0)
    assert second is not first
    assert storage.store(0, *states(), layer=0) is first
    assert storage.store(0, *states(**other), layer=0) is second
    assert storage.block_bytes == first.block_bytes + second.block_bytes


def test_a_layer_on_another_device_has_a_store_there():
    storage = KVStorage(BLOCK_SIZE, FORMATS["auto"])
    first = storage.store(0, *states(), layer=0)
    second = storage.store(0, *(t.to("meta") for t in states()), layer=0)
    assert second is not first
    assert second.key.device.type == "meta"
    assert first.key.device.type == "cpu"


def test_the_storage_says_the_bytes_of_all_its_tensors():
    storage = KVStorage(BLOCK_SIZE, FORMATS["auto"])
    assert storage.nbytes == storage.block_bytes == storage.num_stores == 0
    first, second = storage.store(0, *states(), layer=0), storage.store(1, *states(heads=5), layer=0)
    assert storage.num_stores == 2
    first.reserve(3, limit=3)
    second.reserve(2, limit=2)
    assert storage.nbytes == 3 * first.block_bytes + 2 * second.block_bytes
    assert storage.nbytes == sum(t.nbytes for s in (first, second) for t in (s.key, s.value))


def test_threads_that_ask_for_a_store_at_once_get_the_same_one():
    storage = KVStorage(BLOCK_SIZE, FORMATS["auto"])
    barrier, got = threading.Barrier(8), []

    def ask():
        tokens = states()
        barrier.wait()
        got.append(storage.store(0, *tokens, layer=0))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_keys_of_the_stored_kind_pass_whatever_their_batch_and_length():
    store = store_of()
    assert check_signature(store, *states(7, batch=3), layer=0) is None


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_keys_of_another_kind_are_refused_with_both_kinds_in_words(other):
    store = store_of()
    with pytest.raises(CacheMismatchError) as caught:
        check_signature(store, *states(**other), layer=11)
    words = str(caught.value)
    assert "layer 11 " in words
    assert f"({HEADS}, {KEY_DIM}, {VALUE_DIM}, torch.float32, torch.float32, cpu)" in words
    assert "make a PagedCache for each" in words
    assert str(next(iter(other.values()))) in words.split("was given")[1]
