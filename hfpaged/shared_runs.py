"""Which rows of a decode step read the same blocks first: they are read once for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Tokens that need not be read again, in a whole step, from which runs are told to the kernels one by one.
WORTH_A_CALL = 2048


class SharedRun(NamedTuple):
    """Rows start .. stop - 1, whose tables all begin with the same `blocks` full blocks."""

    start: int
    stop: int
    blocks: int


def shared_runs(tables: npt.NDArray[np.int32], contexts: Many[int], block_size: int) -> tuple[SharedRun, ...]:
    """All rows of `tables` [num_rows, max_blocks] in runs of those that begin alike; none where too little is shared.

    Every row goes on behind the shared blocks of its run, with one token at least.
    """
    if len(tables) < 2 or not (tables[1:, 0] == tables[:-1, 0]).any():
        return ()
    edges = [0, *(np.flatnonzero(tables[1:, 0] != tables[:-1, 0]) + 1).tolist(), len(tables)]
    runs = [_run(tables, contexts, block_size, start, stop) for start, stop in itertools.pairwise(edges)]
    spared = sum((run.stop - run.start - 1) * run.blocks * block_size for run in runs)
    return tuple(runs) if spared and (len(runs) == 1 or spared >= WORTH_A_CALL * len(runs)) else ()


def _run(tables: npt.NDArray[np.int32], contexts: Many[int], block_size: int, start: int, stop: int) -> SharedRun:
    if stop - start == 1:
        return SharedRun(start, stop, 0)
    most = (min(contexts[start:stop]) - 1) // block_size
    same = (tables[start + 1 : stop, :most] == tables[start, :most]).all(axis=0)
    return SharedRun(start, stop, most if same.all() else int(same.argmin()))
