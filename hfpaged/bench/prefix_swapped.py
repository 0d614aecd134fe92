"""Row swapped: how long a request waits for its first token when its prompt was evicted to host memory.

Two prompts take turns in a pool that has room for one, so that each evicts the other: with swap space it comes back,
without it is computed.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

import hfpaged
from hfpaged.bench.generation import Rows, generate
from hfpaged.bench.prefix_prompts import unlike
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED
from hfpaged.bench.turns import in_pairs
from hfpaged.config import DEFAULT_BLOCK_SIZE
from hfpaged.measure import in_turn

WARM_UP = 4  # until both prompts have been evicted, and one of them has come back


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the wait with swap space as a part of that without."""
    prompts = unlike(setting, 2, shape.prompt).split(1)
    PAGED.switch(setting.model)
    pools = {0: _make_pool(setting, shape, 0), 1: _make_pool(setting, shape, 2 * _block_bytes(setting, shape))}
    waits: dict[int, list[float]] = {which: [] for which in pools}
    tokens: dict[int, list[Rows]] = {which: [] for which in pools}
    for number in range(WARM_UP + setting.repeats):
        for which, pool in in_turn(number, list(pools.items())):
            elapsed, rows = _wait(setting, prompts[number % 2], pool, shape.new)
            waits[which].append(1e3 * elapsed)
            tokens[which].append(rows)
    computed, restored = (waits[which][WARM_UP:] for which in (0, 1))
    return in_pairs(computed, restored, "ms", tokens[0] == tokens[1], note=_note(pools[1]))


def _note(pool: Any) -> str:
    costs, counts = pool.swapping.costs, pool.swapping.counts
    back, token = costs.bytes_per_second("host"), costs.seconds_per_token
    if not back or not token or not counts.blocks_in:
        return "nothing came back"
    of_token = counts.bytes_in / counts.blocks_in / pool.block_size / back
    return f"a token: {1e6 * of_token:.1f} us back ({back / 1e9:.1f} GB/s), {1e6 * token:.0f} us computed"


def _block_bytes(setting: Setting, shape: Shape) -> int:
    """Of all blocks of one prompt and what follows it."""
    pool = _make_pool(setting, shape, 0)
    _wait(setting, unlike(setting, 1, pool.block_size), pool, 1)
    return pool.num_blocks * pool.storage.block_bytes


def _make_pool(setting: Setting, shape: Shape, swap_space: int) -> Any:
    groups = len(hfpaged.PagedCache(setting.model).pool.groups)
    blocks = -(-(shape.prompt + shape.new) // DEFAULT_BLOCK_SIZE) * groups
    return hfpaged.PagedCache(setting.model, num_blocks=blocks, swap_space=swap_space).pool


def _wait(setting: Setting, ids: Tensor, pool: Any, new: int) -> tuple[float, Rows]:
    cache = hfpaged.PagedCache(setting.model, pool=pool)
    setting.synchronize()
    start = time.perf_counter()
    rows = generate(setting.model, ids, cache, new)
    setting.synchronize()
    return time.perf_counter() - start, rows
