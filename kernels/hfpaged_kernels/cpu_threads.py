"""How many threads the compiled kernels use, and that they are safe beside other threads and after a fork."""

from __future__ import annotations

import os

import numba
import torch

_forked = False


def threads() -> int:
    """As many as torch uses; 1 in a forked child, where the parent's OpenMP threads do not exist."""
    if _forked:
        return 1
    wanted = min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))
    if numba.get_num_threads() != wanted:
        numba.set_num_threads(wanted)
    return wanted


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
