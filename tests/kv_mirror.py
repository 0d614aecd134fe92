"""A router's side of block events: declared from vLLM's schema alone, it keeps a mirror of which blocks are where."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

from hfpaged.block_table import GONE


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """As vLLM 0.26 to 0.33 declares it, and nothing that hfpaged does; more fields with defaults stand behind these."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


# vLLM 0.15 to 0.23; 0.11 had no lora_name, and a decoder of it passes over what comes behind.
class OldBlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class OldBlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class OldAllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]
    data_parallel_rank: int | None = None


STORED, REMOVED = (BlockStored, OldBlockStored), (BlockRemoved, OldBlockRemoved)


class Mirror:
    """What a router knows: by the hash of each block its parent's hash and its token ids; `below` in host memory."""

    def __init__(self, kind: type = Batch) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self.blocks: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        self.below: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        self._by_medium = {"GPU": self.blocks, "CPU": self.below}
        self.events: list[Any] = []

    def take(self, payload: bytes) -> None:
        for event in self._decode(payload).events:
            self.events.append(event)
            if isinstance(event, STORED):
                self._store(event)
            elif isinstance(event, REMOVED):
                for name in event.block_hashes:
                    del self._by_medium[event.medium][name]  # routers count: what goes has come, once
            else:
                self.blocks.clear()
                self.below.clear()

    def _store(self, event: Any) -> None:
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            start = number * event.block_size
            assert name not in self._by_medium[event.medium]
            self._by_medium[event.medium][name] = parent, tuple(event.token_ids[start : start + event.block_size])
            parent = name

    def prompt(self, name: Any) -> list[int]:
        """All tokens up to the end of a block, by going from parent to parent."""
        parent, tokens = self.blocks[name]
        return ([] if parent is None else self.prompt(parent)) + list(tokens)


class Subscriber(Mirror):
    """A mirror behind two sockets; `last` is the number of the last batch that it has taken."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", kind: type = Batch) -> None:
        super().__init__(kind)
        self.last, self.topics = -1, set()
        self._context = zmq.Context()
        self._events, self._replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._events.subscribe(topic.encode())
        self._events.connect(endpoint)
        if replay_endpoint is not None:
            self._replays.connect(replay_endpoint)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close(0)
        self._replays.close(0)
        self._context.term()

    def receive(self, wait_ms: int = 20) -> tuple[int, bytes] | None:
        """The next message, not taken yet."""
        if not self._events.poll(wait_ms):
            return None
        topic, number, payload = self._events.recv_multipart()
        self.topics.add(topic.decode())
        return int.from_bytes(number, "big"), payload

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """What was sent from number `start` on."""
        self._replays.send_multipart([b"", start.to_bytes(8, "big")])
        answers = []
        while True:
            assert self._replays.poll(10_000), "no answer"
            delimiter, topic, number, payload = self._replays.recv_multipart()  # vLLM 0.26 and later
            assert delimiter == b""
            if number == b"\xff" * 8:
                assert topic == payload == b""
                return answers
            self.topics.add(topic.decode())
            answers.append((int.from_bytes(number, "big"), payload))

    def catch_up(self) -> None:
        """Take all that was sent since the last batch that was taken."""
        for number, payload in self.replay(self.last + 1):
            assert number > self.last
            self.last = number
            self.take(payload)

    def follow_until(self, expected: Any, seconds: float = 30.0) -> None:
        """Take messages until the mirror holds what `expected()` says, asking for those that are missing."""
        end = time.monotonic() + seconds
        while set(self.blocks) != expected():
            assert time.monotonic() < end, f"{len(self.blocks)} blocks known, {len(expected())} are there"
            message = self.receive(500)
            if message is None or message[0] > self.last + 1:  # before the subscription, or lost
                self.catch_up()
            elif message[0] == self.last + 1:
                self.last = message[0]
                self.take(message[1])


def hash_of(digest: bytes) -> int:
    """64 bits, as vLLM makes them of its SHA-256."""
    return int.from_bytes(digest, "big") & (2**64 - 1)


def hashes_in(pool: Any) -> set[int]:
    """Counted from scratch: blocks of tokens that all layer groups of full attention have, or any where none is."""
    index = pool.prefixes.index
    whole = [number for number, group in enumerate(pool.groups) if group.window is None]
    with pool.changing():
        entries = [entry for root in index.roots for entry in _below(root)]
        there = [
            entry for entry in entries
            if (all if whole else any)(entry.blocks[g] != GONE for g in whole or range(len(pool.groups)))
        ]  # fmt: skip
    return {hash_of(entry.digest) for entry in there}


def _below(parent: Any) -> list[Any]:
    children = list(parent.children.values())
    return children + [entry for child in children for entry in _below(child)]
