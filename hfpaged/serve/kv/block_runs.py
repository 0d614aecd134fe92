"""A memory map in few numbers: runs of blocks of one state, and of each holder runs of block ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hfpaged.memory_map import MemoryMap, SequenceBlocks

# Blocks of which a map tells; a page cannot draw more, and blocks that were never handed out come last.
MOST_BLOCKS = 16_384
FREE, CACHED = 0, -1


class Holder(NamedTuple):
    """Who holds blocks: of a "request" all its sequences together, others one by one. `blocks` are sorted, each once;
    `shared` is how many of them others hold too.
    """

    name: str
    kind: str
    blocks: list[int]
    shared: int


def holders_of(memory: MemoryMap, request_ids: Iterable[str]) -> list[Holder]:
    """In the order of the map. Requests of another batcher on the same pool are "other"."""
    known = set(request_ids)
    found: dict[tuple[str, str], list[SequenceBlocks]] = {}
    for sequence in memory.sequences:
        name, kind = sequence.name, sequence.kind
        if kind == "request":
            name, kind = (_request_of(name, known), kind) if sequence.is_own else (name, "other")
        found.setdefault((name, kind), []).append(sequence)
    return [_holder(memory, name, kind, sequences) for (name, kind), sequences in found.items()]


def _request_of(name: str, request_ids: set[str]) -> str:
    """A map says "NAME sample 1" or "NAME beam 1" of requests with several sequences."""
    return name if name in request_ids else " ".join(name.split(" ")[:-2])


def _holder(memory: MemoryMap, name: str, kind: str, sequences: list[SequenceBlocks]) -> Holder:
    own = Counter(block for sequence in sequences for block in sequence.all_blocks)
    shared = sum(memory.refcounts[block] > count for block, count in own.items())
    return Holder(name, kind, sorted(own), shared)


def map_record(memory: MemoryMap, holders: Sequence[Holder]) -> dict[str, Any]:
    """What JSON gets; `states` are runs [state, blocks], see schemas/kv.py. Holders stand in their order."""
    shown = min(memory.num_blocks, MOST_BLOCKS)
    return {
        "blocks_total": memory.num_blocks,
        "blocks_shown": shown,
        "is_cut": shown < memory.num_blocks,
        "states": state_runs(memory, shown),
        "holders": [id_runs(holder.blocks, shown) for holder in holders],
    }


def state_runs(memory: MemoryMap, shown: int) -> list[list[int]]:
    """[state, how many blocks], ...: 0 free, -1 cached, else by how many tables they are held."""
    counts = list(memory.refcounts[:shown])
    for block in memory.cached:
        if block < shown:
            counts[block] = CACHED
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    if shown > len(counts):
        runs.append([FREE, shown - len(counts)])
    return runs


def id_runs(blocks: Iterable[int], shown: int) -> list[list[int]]:
    """[first block id, how many], ... of sorted ids."""
    runs: list[list[int]] = []
    for block in blocks:
        if block >= shown:
            break
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return runs
