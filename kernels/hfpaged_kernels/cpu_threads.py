"""How many threads the compiled kernels use, and that they are safe beside other threads and after a fork.

Also that a first compilation, which takes a minute, is told of.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import numba
import torch
from numba.core import event
from numba.np.ufunc.parallel import _launch_threads

logger = logging.getLogger("hfpaged.kernels")  # below the one that servers write out

_mine = threading.local()
_one_at_a_time = threading.Lock()
_layer: str | None = None
_forked = False
_told = False

# OpenMP first: torch brings its own, and numba then runs on the very threads that torch uses.
if not {"NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY"} & set(os.environ):
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def run(kernel: Any, *arguments: Any) -> None:
    """Call `kernel(threads, *arguments)`; where numba's threads serve one caller only, others wait."""
    if not (_told or kernel.overloads):
        with event.install_listener("numba:compile", _Notice()):
            _call(kernel, *arguments)
    else:
        _call(kernel, *arguments)


class _Notice(event.Listener):
    """Is told where numba compiles, and not where it finds what it has kept."""

    def on_start(self, started: Any) -> None:
        global _told
        if not _told:
            _told = True
            logger.warning(
                "compiling the kernels for this CPU: a minute or more, once; the result is kept in %s",
                started.data["dispatcher"].stats.cache_path or "this process",
            )

    def on_end(self, ended: Any) -> None:
        """Nothing is told then: what waited for it goes on."""


def _call(kernel: Any, *arguments: Any) -> None:
    count = _threads()
    if count > 1 and _layer == "workqueue":
        with _one_at_a_time:
            kernel(count, *arguments)
    else:
        kernel(count, *arguments)


def threading_layer() -> str:
    """ "omp", "tbb" or "workqueue": which of numba's threading layers is in use."""
    return _layer or _start()


def _threads() -> int:
    """As many as torch uses; 1 in a forked child, where the parent's OpenMP threads do not exist."""
    if _forked:
        return 1
    if _layer is None:
        _start()
    wanted: int = torch.get_num_threads()
    if getattr(_mine, "threads", 0) != wanted:
        # numba keeps this number for each thread of Python's.
        numba.set_num_threads(min(wanted, int(numba.config.NUMBA_NUM_THREADS)))
        _mine.threads = wanted
    return min(wanted, int(numba.config.NUMBA_NUM_THREADS))


def _start() -> str:
    """Let numba start its threads, which on a shared OpenMP would change torch's number of threads as well."""
    global _layer
    before = torch.get_num_threads()
    _launch_threads()
    torch.set_num_threads(before)
    _layer = str(numba.threading_layer())
    return _layer


def _after_fork() -> None:
    global _forked, _one_at_a_time
    _forked, _one_at_a_time = True, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
