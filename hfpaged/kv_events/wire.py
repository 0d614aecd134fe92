"""The messages as vLLM's vllm/distributed/kv_events.py declares them: a batch is an array [time, events, rank], and an
event a map with its kind under "type" (vLLM 0.24 and later), or an array that begins with its kind (0.11 to 0.23).

Fields that vLLM gives a default are left out where they have it, and come in its order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hfpaged.kv_events.config import KVEventsConfig
from hfpaged.kv_events.feed import Change
from hfpaged.layer_groups import LayerGroup
from hfpaged.prefix_block import PrefixBlock, Root

# vLLM's words, which are what routers weigh: the memory of the engine itself, on a CPU too, and the host's below it.
OWN_MEDIUM, HOST_MEDIUM = "GPU", "CPU"
# Of the hash of a salt so much is told: routers may tell tenants apart, and none takes it for the hash of an image.
SALT_DIGITS = 16

_encode = msgspec.msgpack.Encoder().encode


class Wire:
    """Writes batches of one pool, whose `groups` say what a block is."""

    def __init__(self, config: KVEventsConfig, groups: tuple[LayerGroup, ...], block_size: int) -> None:
        self._config, self._block_size = config, block_size
        group, layers = next(((n, each) for n, each in enumerate(groups) if each.window is None), (0, groups[0]))
        self._store_spec: dict[str, Any] = {"group_idx": group, "kv_cache_spec_kind": "full_attention"}
        if layers.window is not None:
            self._store_spec |= {
                "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": layers.window,
            }  # fmt: skip
        self._remove_spec = {"group_idx": group}

    def batch(self, time: float, events: list[Any]) -> bytes:
        """`time` in seconds since 1970."""
        return _encode([time, events, self._config.data_parallel_rank])

    def events(self, changes: Iterable[Change], medium: str) -> list[Any]:
        """As few as say it: blocks that are stored one behind the other share one, and so do those removed in a row."""
        events: list[Any] = []
        for is_there, entries in _runs(changes):
            events.append(self._stored(entries, medium) if is_there else self._removed(entries, medium))
        return events

    def cleared(self) -> Any:
        """All blocks are gone."""
        return self._event("AllBlocksCleared", {}, {})

    def _stored(self, entries: list[PrefixBlock], medium: str) -> Any:
        first = entries[0]
        needed = {
            "block_hashes": [self._hash(entry.digest) for entry in entries],
            "parent_block_hash": None if isinstance(first.parent, Root) else self._hash(first.parent.digest),
            "token_ids": [token for entry in entries for token in entry.items],
            "block_size": self._block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": _adapter(first.root),
        }
        salt = first.root.value("salt")
        extra_key = None if salt is None else (salt[:SALT_DIGITS],)  # for each block, as vLLM has it
        return self._event("BlockStored", needed, {"extra_keys": [extra_key] * len(entries)} | self._store_spec)

    def _removed(self, entries: list[PrefixBlock], medium: str) -> Any:
        hashes = [self._hash(entry.digest) for entry in entries]
        return self._event("BlockRemoved", {"block_hashes": hashes, "medium": medium}, self._remove_spec)

    def _event(self, kind: str, needed: dict[str, Any], rest: dict[str, Any]) -> Any:
        """`rest` has fields of late versions, whose places in an array differ from version to version."""
        return {"type": kind, **needed, **rest} if self._config.schema == "map" else [kind, *needed.values()]

    def _hash(self, digest: bytes) -> int | bytes:
        return int.from_bytes(digest[-8:], "big") if self._config.int_hashes else digest


def is_plain(entry: PrefixBlock) -> bool:
    """Whether its token ids and the name of an adapter say all: not with images or embeddings, nor positions of the
    caller's own, for which events have no words that a router could compare.
    """
    root = entry.root
    return root.width == 1 and not any(key.kind.startswith("input:") for key in root.keys)


def _runs(changes: Iterable[Change]) -> list[tuple[bool, list[PrefixBlock]]]:
    runs: list[tuple[bool, list[PrefixBlock]]] = []
    for entry, is_there in changes:
        goes_on = bool(runs) and runs[-1][0] == is_there and (not is_there or entry.parent is runs[-1][1][-1])
        if goes_on:
            runs[-1][1].append(entry)
        else:
            runs.append((is_there, [entry]))
    return runs


def _adapter(root: Root) -> str | None:
    names = [key.value for key in root.keys if key.kind == "adapter"]
    return "+".join(names) if names else None
