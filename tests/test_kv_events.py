"""Block events over real sockets: a router that knows the schema alone has a true picture, whatever happens."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from array import array

import msgspec
import pytest
import tiny_models
import torch
import zmq
from kv_mirror import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Mirror,
    OldAllBlocksCleared,
    OldBatch,
    OldBlockRemoved,
    OldBlockStored,
    Subscriber,
    hash_of,
    hashes_in,
)

from hfpaged import ContinuousBatcher, InvalidConfigError, KVPool, PagedCache, kv_events
from hfpaged.block_hash import ExtraKey, salt_key
from hfpaged.block_manager import BlockManager
from hfpaged.block_pool import BlockPool
from hfpaged.kv_events import KVEventsConfig, publishing
from hfpaged.kv_events.endpoint import Endpoint
from hfpaged.kv_events.feed import BlockFeed, Change, is_in_pool
from hfpaged.kv_events.publisher import Publisher
from hfpaged.kv_events.replay_buffer import Batch as KeptBatch
from hfpaged.kv_events.replay_buffer import ReplayBuffer
from hfpaged.kv_events.wire import Wire
from hfpaged.kv_format import FORMATS
from hfpaged.layer_groups import LayerGroup
from hfpaged.prefix_cache import PrefixCache
from hfpaged.token_chain import TokenChain

pytestmark = pytest.mark.usefixtures("one_thread")

FREE = "tcp://127.0.0.1:*"
BLOCK = 4
MODEL = (ExtraKey("model", "m"),)


@pytest.fixture(scope="module")
def llama():
    return tiny_models.make("llama")


def prompt(seed, length=14):
    return torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model, cache, seed, length=14):
    cache.reset()
    model.generate(prompt(seed, length), past_key_values=cache, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_a_mirror_equals_the_index_after_any_traffic(name, tmp_path):
    model = tiny_models.make(name)
    cache = PagedCache(model, block_size=BLOCK, num_blocks=40)
    pool = cache.pool
    with (
        kv_events.publish(cache, FREE, replay_endpoint=FREE) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as router,
    ):
        for seed in range(20):  # more than fits
            generate(model, cache, seed % 5 if seed % 3 else seed + 5)
            router.follow_until(lambda: hashes_in(pool))
        assert any(isinstance(event, BlockRemoved) for event in router.events)
        cache.reset()
        pool.save_prefixes(tmp_path / "prefixes")
        saved = hashes_in(pool)
        pool.drop_prefixes()
        router.follow_until(set)
        pool.load_prefixes(tmp_path / "prefixes")
        assert hashes_in(pool) == saved != set()
        router.follow_until(lambda: saved)
        assert {event.medium for event in router.events if isinstance(event, BlockStored)} == {"GPU"}


@pytest.mark.parametrize(("name", "num_blocks"), [("llama", 20), ("gemma2", 40)])
def test_what_lies_in_host_memory_below_the_pool_is_told_as_such(name, num_blocks):
    model = tiny_models.make(name)
    cache = PagedCache(model, block_size=BLOCK, num_blocks=num_blocks, swap_space=1 << 16)
    pool, host = cache.pool, cache.pool.swapping.host
    whole = [number for number, group in enumerate(pool.groups) if group.window is None]
    with (
        kv_events.publish(cache, FREE, replay_endpoint=FREE) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as router,
    ):
        for seed in range(24):
            generate(model, cache, seed % 9)
            router.follow_until(lambda: hashes_in(pool))
        pool.swapping.flush()
        there = {hash_of(e.digest) for e in host.entries() if all(host.place(e, group) >= 0 for group in whole)}
        assert there
        wait_for(lambda: router.catch_up() or set(router.below) == there)
        cache.reset()
        pool.drop_prefixes()
        wait_for(lambda: router.catch_up() or not (router.below or router.blocks))
        assert any(isinstance(event, BlockRemoved) and event.medium == "CPU" for event in router.events)


def test_requests_of_a_batcher_are_followed_and_their_prompts_can_be_read_from_parent_to_parent(llama):
    batcher = ContinuousBatcher(llama, num_blocks=60, block_size=BLOCK, prepack=False)
    with (
        kv_events.publish(batcher, FREE, replay_endpoint=FREE, topic="kv@pod@model") as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint, "kv@") as router,
    ):
        prompts = [prompt(seed, 17)[0].tolist() for seed in range(8)]
        outputs = batcher.generate(prompts, max_new_tokens=7)
        router.follow_until(lambda: hashes_in(batcher.pool))
        known = {tuple(router.prompt(name)) for name in router.blocks}
        for asked, output in zip(prompts, outputs, strict=True):
            tokens = asked + list(output.token_ids)
            full = (len(tokens) - 1) // BLOCK * BLOCK  # the last token was never stored
            assert tuple(tokens[:full]) in known
        while router.receive(50) is not None:
            pass
        assert router.topics <= {"kv@pod@model"}
    assert publisher.counts == batcher.pool.counts.block_events
    assert publisher.counts["stored"] - publisher.counts["removed"] == len(hashes_in(batcher.pool))
    assert publisher.counts["dropped"] == 0
    batcher.close()


def test_what_was_there_before_is_told_first_and_a_router_that_comes_late_gets_it(llama):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    generate(llama, cache, 1)
    with kv_events.publish(cache.pool, FREE, replay_endpoint=FREE) as publisher:
        generate(llama, cache, 2)
        with Subscriber(publisher.endpoint, publisher.replay_endpoint) as router:
            wait_for(lambda: router.catch_up() or set(router.blocks) == hashes_in(cache.pool))
            assert isinstance(router.events[0], AllBlocksCleared)
            generate(llama, cache, 3)
            router.follow_until(lambda: hashes_in(cache.pool))
    generate(llama, cache, 4)  # nobody follows any more
    assert cache.pool.prefixes.index.watchers == []


def test_messages_that_were_lost_are_replayed(llama):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=30)
    with (
        kv_events.publish(cache, FREE, replay_endpoint=FREE) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as router,
    ):
        seeds = itertools.count(100)
        wait_for(lambda: generate(llama, cache, next(seeds)) or router.receive(200))
        router.catch_up()
        for seed in range(4):
            generate(llama, cache, seed)
        while router.receive(200) is not None:
            pass  # lost
        before = router.last
        generate(llama, cache, 9)
        router.follow_until(lambda: hashes_in(cache.pool))
        assert router.last > before + 1
        numbers = [number for number, _ in router.replay(0)]
        assert numbers == list(range(len(numbers)))
        assert router.replay(len(numbers)) == []


def test_a_router_that_missed_more_than_is_kept_gets_all_that_is_there(llama):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    with (
        kv_events.publish(cache, FREE, replay_endpoint=FREE, buffer_steps=2) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as router,
    ):
        for seed in range(4):
            generate(llama, cache, seed)
            wait_for(lambda: publisher.counts.get("stored", 0) >= len(hashes_in(cache.pool)))
        ((last, everything),) = router.replay(0)
        assert [number for number, _ in router.replay(last - 1)] == [last - 1, last]
        assert last > 2
        router.last = last
        router.take(everything)
        assert set(router.blocks) == hashes_in(cache.pool)
        generate(llama, cache, 9)
        router.follow_until(lambda: hashes_in(cache.pool))


def test_a_replay_in_the_older_schema_has_no_topic(llama):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    settings = {"schema": "array", "topic": "kv", "replay_endpoint": FREE}
    with (
        kv_events.publish(cache, FREE, **settings) as publisher,
        zmq.Context() as context,
        context.socket(zmq.REQ) as asking,
    ):
        wait_for(lambda: publisher.counts["cleared"])
        asking.connect(publisher.replay_endpoint)
        asking.send((0).to_bytes(8, "big"))
        number, payload = asking.recv_multipart()
        assert (int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]) == (0, [["AllBlocksCleared"]])


def wait_for(holds, seconds=30.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("frames", [[b""], [b"", b"123"], [b"", b"", b"12345678"], [b"12345678"]])
def test_a_request_that_is_none_is_passed_over(llama, frames):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    with (
        kv_events.publish(cache, FREE, replay_endpoint=FREE) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as router,
    ):
        router._replays.send_multipart(frames)
        wait_for(lambda: router.replay(0))


# Below sockets: a pool that tests drive.


class Driven:
    """A pool of block ids alone, and a feed of it."""

    def __init__(self, windows=(None,), num_blocks=12, capacity=1000, keys=MODEL):
        self.pool = BlockPool(num_blocks)
        self.manager = BlockManager(self.pool, len(windows), BLOCK, list(windows))
        self.prefixes = PrefixCache(self.manager, list(windows))
        self.groups = tuple(LayerGroup(window, (number,)) for number, window in enumerate(windows))
        self.feed = BlockFeed(self.prefixes.index, is_in_pool, list(windows), capacity, threading.Event())
        self.keys = keys

    def publish(self, tokens, withdraw=lambda blocks: ()):
        sequence = self.manager.create()
        self.manager.grow([(sequence, len(tokens))])
        sequence.chain = TokenChain(self.prefixes.index.root(self.keys), array("q", tokens), [])
        self.prefixes.publish(sequence)
        self.prefixes.withdraw(withdraw([block for table in sequence.tables for block in table.blocks if block >= 0]))
        self.manager.free(sequence)

    def changes(self):
        """As the publisher takes them: all anew, or what has changed."""
        told = [] if not self.feed.take_behind() else [None, *self.feed.snapshot()]
        return told + self.feed.take(10**6)

    def there(self):
        whole = [number for number, group in enumerate(self.groups) if group.window is None]
        index = self.prefixes.index
        return {
            entry.number for entry in index.entries()
            if not whole or all(entry.blocks[group] >= 0 for group in whole)
        }  # fmt: skip


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 6), (6, 10)])
@pytest.mark.parametrize("capacity", [3, 1000])
def test_the_changes_lead_to_what_is_there_for_random_traffic(windows, capacity):
    for seed in range(30):
        rng = random.Random(seed)
        driven, mirror = Driven(windows, 8 * len(windows), capacity), set()
        driven.feed.start()
        dropped = 0
        for _ in range(40):
            what = rng.random()
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 5) * BLOCK)]
            if what < 0.7:
                driven.publish(tokens)
            elif what < 0.8:
                driven.pool.drop_cached()
            else:  # a block of one group alone goes
                driven.publish(tokens, lambda blocks: blocks[: len(blocks) // 3])
            if rng.random() < 0.4:
                for change in driven.changes():
                    if change is None:
                        mirror.clear()
                    else:
                        (mirror.add if change.is_there else mirror.discard)(change.entry.number)
                dropped += driven.feed.take_dropped()
                assert mirror == driven.there()
        assert (dropped > 0) == (capacity == 3)


def test_nobody_who_takes_nothing_makes_the_queue_grow():
    driven = Driven(num_blocks=40, capacity=10)
    driven.feed.start()
    for start in range(50):
        driven.publish(range(100 * start, 100 * start + 3 * BLOCK))
        assert len(driven.feed._changes) <= 10
    assert driven.feed.take_behind()
    assert driven.feed.take_dropped() >= 50
    assert driven.feed.take_dropped() == 0


def test_a_feed_that_falls_behind_while_it_is_asked_stays_behind():
    class FallsBehind(BlockFeed):
        """Another thread drops changes right behind the look."""

        _state = False

        @property
        def _is_behind(self):
            before, self._state = self._state, True
            return before

        @_is_behind.setter
        def _is_behind(self, value):
            self._state = value

    driven = Driven()
    feed = FallsBehind(driven.prefixes.index, is_in_pool, [None], 10, threading.Event())
    feed._state = False
    assert not feed.take_behind()
    assert feed.take_behind()


def test_a_snapshot_has_each_parent_before_its_children():
    driven = Driven(num_blocks=40)
    driven.publish(range(12))
    driven.publish([*range(8), 99, 98, 97, 96])
    seen = set()
    for entry, _ in driven.feed.snapshot():
        assert entry.parent in seen or entry.parent is entry.root
        seen.add(entry)
    assert len(seen) == 4


def entries_of(driven):
    return [entry for entry, _ in driven.feed.snapshot()]


def wire_of(driven, **settings):
    return Wire(KVEventsConfig(**settings), driven.groups, BLOCK)


def test_the_bytes_are_those_of_the_structs_that_vllm_declares():
    driven = Driven()
    driven.publish(range(12))
    first, second, third = entries_of(driven)
    changes = [*(Change(entry, True) for entry in (first, second, third)), Change(third, False), Change(second, False)]
    wire = wire_of(driven, data_parallel_rank=1)
    hashes = [hash_of(entry.digest) for entry in (first, second, third)]
    spec = {"extra_keys": [None] * 3, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    stored = BlockStored(hashes, None, list(range(12)), BLOCK, None, "GPU", None, **spec)
    removed = BlockRemoved([hashes[2], hashes[1]], "GPU", 0)
    expected = Batch(12.5, [AllBlocksCleared(), stored, removed], 1)
    assert wire.batch(12.5, [wire.cleared(), *wire.events(changes, "GPU")]) == msgspec.msgpack.encode(expected)
    old = wire_of(driven, schema="array", int_hashes=False)
    digests = [entry.digest for entry in (first, second, third)]
    stored = OldBlockStored(digests, None, list(range(12)), BLOCK, None, "GPU", None)
    expected = OldBatch(12.5, [OldAllBlocksCleared(), stored, OldBlockRemoved([digests[2], digests[1]], "GPU")], 0)
    assert old.batch(12.5, [old.cleared(), *old.events(changes, "GPU")]) == msgspec.msgpack.encode(expected)


def test_an_event_ends_where_the_chain_does():
    driven = Driven(num_blocks=40)
    driven.publish(range(8))
    driven.publish([*range(4), 50, 51, 52, 53])
    a, b, c = entries_of(driven)
    events = wire_of(driven).events([Change(a, True), Change(b, True), Change(c, True), Change(b, False)], "GPU")
    assert [(event["type"], len(event["block_hashes"])) for event in events] == [
        ("BlockStored", 2), ("BlockStored", 1), ("BlockRemoved", 1),
    ]  # fmt: skip
    assert events[1]["parent_block_hash"] == events[0]["block_hashes"][0]


def test_layers_with_a_window_alone_are_told_as_such():
    driven = Driven((6, 10))
    driven.publish(range(8))
    (event,) = wire_of(driven).events(driven.feed.snapshot(), "GPU")
    assert event["kv_cache_spec_kind"] == "sliding_window"
    assert event["kv_cache_spec_sliding_window"] == 6
    mixed = wire_of(Driven((6, None))).events(driven.feed.snapshot()[:1], "GPU")
    assert (mixed[0]["group_idx"], mixed[0]["kv_cache_spec_kind"]) == (1, "full_attention")


def published(driven, **settings):
    """What a router knows of all that a pool has told, from the start to the end of a publisher."""
    config = KVEventsConfig(endpoint=FREE, replay_endpoint=FREE, **settings)
    publisher = Publisher({"GPU": driven.feed}, Wire(config, driven.groups, BLOCK), config, {})
    publisher.start()
    publisher.close()
    mirror = Mirror()
    for batch in publisher._buffer.since(0)[0]:
        mirror.take(batch.payload)
    return mirror


def told(publisher_settings, keys):
    """The events of one prompt under `keys`, as they go out."""
    driven = Driven(keys=keys)
    driven.publish(range(8))
    return [event for event in published(driven, **publisher_settings).events if isinstance(event, BlockStored)]


def test_what_changes_while_all_is_told_is_told_once():
    driven = Driven()
    driven.publish(range(8))
    snapshot = driven.feed.snapshot

    def beside_changes():
        driven.pool.drop_cached()
        driven.publish(range(12))
        return snapshot()

    driven.feed.snapshot = beside_changes
    driven.feed.stop = lambda: None  # the end may come before the snapshot
    router = published(driven)
    assert set(router.blocks) == {hash_of(entry.digest) for entry in entries_of(driven)}
    assert len(router.blocks) == 3


def test_salted_prompts_are_told_only_when_that_is_asked_for_and_then_without_their_salt():
    keys = (*MODEL, salt_key("secret"))
    assert told({}, keys) == []
    (event,) = told({"salted": True}, keys)
    assert event.token_ids == list(range(8))
    (first,), (second,) = event.extra_keys
    assert first == second
    assert "secret" not in first
    assert salt_key("secret").value.startswith(first)
    assert len(first) < 64  # 64 hex digits are the hash of an image to some routers
    (plain,) = told({}, MODEL)
    assert plain.extra_keys == [None, None]
    assert plain.block_hashes != event.block_hashes  # no tenant's block is taken for another's


def test_adapters_go_by_their_names_and_what_token_ids_cannot_say_is_not_told():
    (event,) = told({}, (*MODEL, ExtraKey("adapter", "math")))
    assert event.lora_name == "math"
    assert told({}, (*MODEL, ExtraKey("input:pixel_values", "hash"))) == []


def test_what_is_kept_for_replays_is_bounded_in_batches_and_bytes():
    buffer = ReplayBuffer(3, most_bytes=100)
    for number in range(5):
        buffer.add(KeptBatch(number, b"x"))
    assert [batch.number for batch in buffer.since(0)[0]] == [2, 3, 4]
    assert buffer.since(4) == ([KeptBatch(4, b"x")], 2)
    buffer.add(KeptBatch(5, b"x" * 99))
    assert buffer.since(0)[1] == 4
    buffer.add(KeptBatch(6, b"x" * 1000))
    assert [batch.number for batch in buffer.since(0)[0]] == [6]


def test_the_ports_are_free_afterwards_and_a_taken_one_is_told(llama):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    with kv_events.publish(cache, FREE, replay_endpoint=FREE) as publisher:
        ports = [int(text.rpartition(":")[2]) for text in (publisher.endpoint, publisher.replay_endpoint)]
        with (
            pytest.raises(InvalidConfigError, match=r"cannot publish KV events at .*: Address already in use; name"),
            kv_events.publish(cache, publisher.endpoint),
        ):
            pass
        assert len(cache.pool.prefixes.index.watchers) == 1
    for port in ports:
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", port))


def test_a_file_belongs_to_one_publisher_and_is_gone_afterwards(llama, tmp_path):
    cache, at = PagedCache(llama, block_size=BLOCK, num_blocks=40), f"ipc://{tmp_path}/events"
    with kv_events.publish(cache, at) as publisher, Subscriber(at) as router:
        with pytest.raises(InvalidConfigError, match="Address already in use"), kv_events.publish(cache, at):
            pass
        seeds = itertools.count()
        wait_for(lambda: generate(llama, cache, next(seeds)) or router.receive(200))
        assert publisher.endpoint == at
    assert list(tmp_path.iterdir()) == []
    with plain_socket(tmp_path / "events"):
        pass  # of one who was killed
    with kv_events.publish(cache, at):
        assert (tmp_path / "events").exists()


def plain_socket(path):
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(path))
    return unix


def test_nobody_fills_the_memory_with_what_he_sends(llama):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    with (
        kv_events.publish(cache, FREE, replay_endpoint=FREE) as publisher,
        Subscriber(publisher.endpoint, publisher.replay_endpoint) as router,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as hostile,
    ):
        hostile.setsockopt(zmq.LINGER, 0)
        hostile.connect(publisher.replay_endpoint)
        monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        hostile.send_multipart([b"", b"x" * 100_000])
        assert monitor.poll(10_000), "the connection should have been closed"
        hostile.disable_monitor()
        wait_for(lambda: router.replay(0))


BAD = {
    "endpoint": ["", "5557", "http://127.0.0.1:5557", "tcp://127.0.0.1", "tcp://*:99999", "ipc://", "tcp://a b:1", 5],
    "replay_endpoint": ["tcp://router.example:5558", "x"],
    "buffer_steps": [0, "many", True],
    "hwm": [-1],
    "max_queue_size": [0],
    "schema": ["xml"],
    "data_parallel_rank": [-1],
    "salted": ["yes"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_what_cannot_be_is_refused_with_its_name_or_an_example(name, value):
    with pytest.raises(InvalidConfigError, match=rf"{name}=|write tcp://127.0.0.1:5557"):
        KVEventsConfig(**{name: value})


def test_an_address_of_this_machine_is_bound_and_any_other_one_connected_to():
    here = ["tcp://*:1", "tcp://127.0.0.1:1", "tcp://0.0.0.0:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///tmp/x"]
    assert all(Endpoint.parse(text).is_here for text in here)
    assert not Endpoint.parse("tcp://router.example:5557").is_here
    private = [text for text in here if Endpoint.parse(text).is_private]
    assert private == [text for text in here if "*" not in text and "0.0.0.0" not in text]
    assert str(Endpoint.parse("tcp://[::]:5557")) == "tcp://[::]:5557"


def test_others_on_the_network_are_warned_of(llama, caplog):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    with kv_events.publish(cache, FREE):
        assert "token ids" not in caplog.text
    with kv_events.publish(cache, "tcp://*:*"):
        assert "hold the token ids of prompts and answers in clear" in caplog.text


def test_a_publisher_connects_to_a_router_on_another_machine(llama, monkeypatch):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe(b"")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        monkeypatch.setattr(Endpoint, "is_here", False)
        with kv_events.publish(cache, f"tcp://127.0.0.1:{port}"):
            seeds, mirror = itertools.count(), Mirror()
            wait_for(lambda: generate(llama, cache, next(seeds)) or router.poll(200))
            mirror.take(router.recv_multipart()[2])
        assert mirror.events
        router.close(0)


def test_a_router_that_is_not_there_keeps_nobody_waiting(llama):
    cache = PagedCache(llama, block_size=BLOCK, num_blocks=40)
    with kv_events.publish(cache, "tcp://nowhere.invalid:5557"):
        generate(llama, cache, 1)


@pytest.mark.parametrize("of", [None, 5, "pool"])
def test_what_has_no_blocks_is_refused(of):
    with (
        pytest.raises(InvalidConfigError, match="give a ContinuousBatcher, a PagedCache or a KVPool"),
        kv_events.publish(of, FREE),
    ):
        pass


def test_without_the_extra_the_package_to_install_is_named(monkeypatch, llama):
    monkeypatch.setattr(publishing, "find_spec", lambda name: None)
    with (
        pytest.raises(InvalidConfigError, match=r"pyzmq and msgspec.*pip install 'hfpaged\[events\]'"),
        kv_events.publish(PagedCache(llama, num_blocks=4), FREE),
    ):
        pass


def test_nothing_is_imported_before_somebody_wants_events():
    code = (
        "import sys, hfpaged; hfpaged.kv_events.publish\n"
        "print(sorted({'torch', 'zmq', 'msgspec', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


JSON = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'


def test_the_json_of_vllm_is_understood():
    assert KVEventsConfig.from_json(JSON) == KVEventsConfig(endpoint="tcp://*:5557", topic="kv")
    for off in ("{}", '{"enable_kv_cache_events": false}', '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert KVEventsConfig.from_json(off) is None
    for wrong in ("", "[]", '{"port": 1}', '{"publisher": "nats"}', '{"enable_kv_cache_events": true, "hwm": 0}'):
        with pytest.raises(InvalidConfigError):
            KVEventsConfig.from_json(wrong)


def test_a_pool_may_be_given_as_such():
    pool = KVPool((LayerGroup(None, (0,)),), block_size=4, kv_format=FORMATS["auto"])
    with kv_events.publish(pool, FREE) as publisher:
        wait_for(lambda: publisher.counts.get("cleared") == 1)
