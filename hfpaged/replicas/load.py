"""How much a replica has to do, for those who choose between replicas or start more of them."""

from __future__ import annotations

from typing import NamedTuple

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.telemetry.batcher_readings import RUNNING, WAITING
from hfpaged.telemetry.collector import read_one


class Load(NamedTuple):
    """Requests that hold blocks, those that wait for some, the share of the pool's blocks that requests hold (0 to 1),
    and the most sequences of one step.
    """

    running: int
    waiting: int
    kv_use: float
    max_num_seqs: int


def load_of(batcher: ContinuousBatcher) -> Load:
    """Now."""
    numbers = read_one(batcher).of(batcher.tally.model_name).numbers
    blocks = batcher.pool.blocks
    return Load(
        int(numbers[RUNNING]), int(numbers[WAITING]), blocks.num_used / max(blocks.num_blocks, 1),
        batcher.limits["max_num_seqs"],
    )  # fmt: skip
