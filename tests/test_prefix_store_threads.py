"""Who writes and reads the files of a prefix store beside an engine: bounded, in order, and never in anybody's way."""

from __future__ import annotations

import os
import threading
import time

import forked
import pytest
from prefix_store_blocks import addresses, contents, facts, layers

from hfpaged import prefix_store_reader, prefix_store_writer
from hfpaged.prefix_store import PrefixStore
from hfpaged.prefix_store_reader import StoreReader
from hfpaged.prefix_store_writer import Copied, Published, StoreWriter

LIMIT = 2**20


@pytest.fixture
def store(tmp_path):
    return PrefixStore(tmp_path / "store", facts(), LIMIT)


@pytest.fixture
def writer(store):
    writer = StoreWriter(store, take)
    yield writer
    writer.end(5)


def copied(address, group=0):
    return Copied(address, group, layers(group), contents(address, group))


def take(wanted):
    return [copied(one.address, one.group) for one in wanted]


def published(address, group=0):
    return Published(None, group, address)


def test_all_is_written_the_beginning_of_each_prefix_first(store, writer, monkeypatch):
    order = []
    put = store.put
    monkeypatch.setattr(store, "put", lambda address, *block: order.append(address.number) or put(address, *block))
    chain = addresses(1, 12)
    for address in chain:
        writer.publish(published(address))
    assert writer.flush(20)
    assert order == list(range(12))
    assert all(store.has(address, 0) for address in chain)
    assert writer.num_waiting == 0


def test_what_is_there_already_is_marked_as_used_and_not_copied(store, monkeypatch):
    asked = []
    writer = StoreWriter(store, lambda wanted: asked.extend(wanted) or take(wanted))
    first, second = addresses(1, 2)
    store.put(*copied(first))
    path = store.folder.file(first.name(0))
    os.utime(path, (1, 1))
    for address in (first, second):
        writer.publish(published(address))
    assert writer.flush(20)
    assert [one.address for one in asked] == [second]
    assert path.stat().st_mtime > 1
    writer.end(5)


def test_blocks_that_are_gone_when_their_turn_comes_are_not_written(store):
    writer = StoreWriter(store, lambda wanted: [])
    writer.publish(published(addresses(1, 1)[0]))
    assert writer.flush(20)
    assert store.counts.written == 0
    writer.end(5)


def blocked(store):
    """A writer that stands still, with one block in its hands, until the event is set."""
    goes_on, stands = threading.Event(), threading.Event()

    def wait(wanted):
        stands.set()
        goes_on.wait(20)
        return take(wanted)

    writer = StoreWriter(store, wait)
    writer.publish(published(addresses(9, 1)[0]))
    assert stands.wait(20)
    return writer, goes_on


def test_a_full_queue_drops_and_counts(store, monkeypatch):
    writer, goes_on = blocked(store)
    first, second, *others = addresses(1, 8)
    monkeypatch.setattr(prefix_store_writer, "BUFFER_BYTES", copied(first).nbytes)
    monkeypatch.setattr(prefix_store_writer, "MOST_PUBLISHED", 3)
    assert writer.has_room(copied(first).nbytes)
    writer.write(copied(first))
    assert not writer.has_room(copied(second).nbytes)
    for address in others:
        writer.publish(published(address))
    assert store.counts.dropped == 1 + len(others) - 3
    goes_on.set()
    assert writer.flush(20)
    assert store.has(first, 0)
    assert [store.has(address, 0) for address in others] == [True] * 3 + [False] * (len(others) - 3)
    assert writer.has_room(copied(second).nbytes)
    writer.end(5)


def test_a_disk_that_takes_nothing_is_asked_for_no_copies(store, writer):
    store._rests_until = time.monotonic() + 60
    assert not writer.has_room(1)
    writer.publish(published(addresses(1, 1)[0]))
    assert writer.flush(20)
    assert (store.counts.dropped, store.counts.written) == (2, 0)


def test_ending_writes_what_waits_and_takes_no_more(store):
    writer, goes_on = blocked(store)
    chain = addresses(1, 5)
    for address in chain:
        writer.publish(published(address))
    goes_on.set()
    writer.end(20)
    assert all(store.has(address, 0) for address in chain)
    assert not writer.has_room(1)
    writer.publish(published(addresses(2, 1)[0]))
    assert writer.num_waiting == 0


def test_ending_at_once_drops_and_counts_what_waits(store):
    writer, goes_on = blocked(store)
    for address in addresses(1, 5):
        writer.publish(published(address))
    writer.end()
    goes_on.set()
    assert writer.flush(20)
    assert (store.counts.dropped, store.counts.written) == (5, 1)


def test_what_goes_wrong_with_copies_ends_no_thread(store, caplog):
    def fail(wanted):
        raise MemoryError("no memory")

    writer = StoreWriter(store, fail)
    writer.publish(published(addresses(1, 1)[0]))
    assert writer.flush(20)
    assert store.is_resting
    store._rests_until = 0.0
    writer.write(copied(addresses(2, 1)[0]))
    assert writer.flush(20)
    assert store.has(addresses(2, 1)[0], 0)
    assert ["MemoryError" in record.message for record in caplog.records] == [True]
    writer.end(5)


def test_what_is_forgotten_is_not_written(store):
    writer, goes_on = blocked(store)
    (address,) = addresses(1, 1)
    writer.publish(published(address))
    writer.write(copied(address, 1))
    writer.forget()
    goes_on.set()
    assert writer.flush(20)
    assert not store.has(address, 0)
    assert not store.has(address, 1)
    writer.end(5)


AT_EXIT = """
import sys, time
from test_prefix_store_threads import *
store = PrefixStore(sys.argv[1], facts(), 2**20)
def slowly(wanted):
    time.sleep(0.1)
    return take(wanted)
writer = StoreWriter(store, slowly)
for address in addresses(1, 8):
    writer.publish(published(address))
"""


def test_a_process_that_ends_in_peace_writes_what_waits(store, tmp_path):
    code, said = tmp_path / "at_exit.py", tmp_path / "said"
    code.write_text(AT_EXIT)
    process = forked.start([str(code), str(store.folder.path)], forked.shared_environment(), said)
    assert process.wait(120) == 0, said.read_text()
    assert all(store.has(address, 0) for address in addresses(1, 8))


@pytest.fixture
def reader(store):
    reader = StoreReader(store)
    yield reader
    reader.end()


def until_read(reader, wanted):
    for _ in range(200):
        if not reader.fetch(wanted, 1000):
            return
        reader.wait(0.1)
    raise AssertionError("it is never read")


def test_what_is_fetched_comes_and_is_taken_once(store, reader):
    chain = addresses(1, 6)
    for address in chain:
        store.put(*copied(address))
    wanted = [(address, 0) for address in chain]
    assert reader.fetch(wanted, 1000)
    until_read(reader, wanted)
    assert all(reader.is_staged(*one) for one in wanted)
    assert len(reader.timings()) == 6
    assert reader.timings() == []
    for address in chain:
        assert reader.take(address, 0).layers == layers(0)
        assert not reader.is_staged(address, 0)
    assert store.counts.read == 6
    assert reader.wait(0)


def test_what_cannot_be_read_is_waited_for_once(store, reader):
    first, second = addresses(1, 2)
    store.put(*copied(first))
    store.folder.file(first.name(0)).write_bytes(b"no block")
    wanted = [(first, 0), (second, 0)]
    until_read(reader, wanted)
    store.put(*copied(first))
    assert not reader.fetch(wanted, 1000)
    assert not reader.may_be_there(first, 0)
    assert not reader.is_staged(first, 0)


def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever(store, reader, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(store, "get", lambda *block: answers.wait(20) and None)
    wanted = [(addresses(1, 1)[0], 0)]
    assert reader.fetch(wanted, 1000)
    monkeypatch.setattr(prefix_store_reader, "PATIENCE_SECONDS", 0.0)
    assert not reader.fetch(wanted, 1000)
    answers.set()


def test_no_more_is_read_ahead_than_has_room_and_what_nobody_takes_goes(store, reader, monkeypatch):
    chain = addresses(1, 6)
    for address in chain:
        store.put(*copied(address))
    monkeypatch.setattr(prefix_store_reader, "STAGED_BYTES", 4000)
    wanted = [(address, 0) for address in chain]
    until_read(reader, wanted)
    assert [reader.is_staged(*one) for one in wanted] == [True] * 4 + [False] * 2
    with monkeypatch.context() as patched:
        patched.setattr(prefix_store_reader, "KEPT_SECONDS", 0.0)
        time.sleep(0.01)
        assert not reader.fetch(wanted[:2], 1000)  # which keeps them
    assert [reader.is_staged(*one) for one in wanted] == [True] * 2 + [False] * 4
    until_read(reader, wanted[3:5])
    assert [reader.is_staged(*one) for one in wanted] == [True, True, False, True, True, False]
