"""The sequences that requests hold, by the names by which people know them."""

from __future__ import annotations

from collections.abc import Iterator

from hfpaged.engine.request import SequenceGroup
from hfpaged.engine.scheduler import Scheduler
from hfpaged.kv_pool import KVPool
from hfpaged.memory_owners import Owned


def describe_requests(pool: KVPool, scheduler: Scheduler) -> None:
    """Let maps of the pool's memory name the requests of this scheduler."""
    with pool.changing():
        pool.describers[scheduler] = request_sequences


def request_sequences(scheduler: Scheduler) -> Iterator[Owned]:
    """Those that hold blocks; only requests that run do. Call it under the lock of the pool."""
    for group in scheduler.running:
        for number, seq in enumerate(group.sequences):
            blocks = seq.blocks
            if blocks is not None:
                yield Owned(blocks, _name(group, number), "request")


def _name(group: SequenceGroup, number: int) -> str:
    request = group.request
    if group.beams is not None:
        return f"{request.request_id} beam {number}"
    if len(request.sequences) > 1:
        return f"{request.request_id} sample {group.sequences[number].index}"
    return request.request_id
