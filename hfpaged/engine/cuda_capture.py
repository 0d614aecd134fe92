"""A forward recorded as a CUDA graph: hundreds of launches that one call repeats, with nothing of Python between them.

As in CUDA's programming guide, "CUDA Graphs", and torch.cuda.CUDAGraph. Whatever the forward read from the host when it
was recorded, numbers and shapes, stays as it was; only what lies in the tensors that it read is read anew.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfpaged import compat
from hfpaged.errors import UnsupportedModelError

Forward: TypeAlias = Callable[[], Tensor]
WAIT = "synchronizing CUDA operation"  # what torch says of one
_one_at_a_time = threading.Lock()  # all that a process may record
# Given a forward, records it and returns what repeats it; each repetition writes into the same result.
Capture: TypeAlias = Callable[[Forward], Forward]


class CudaCapture:
    """Records forwards on one device. They share their memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, forward: Forward) -> Forward:
        """Raises UnsupportedModelError for a forward that waits for the device, and whatever it raises."""
        with _one_at_a_time, torch.cuda.device(self._device):
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            self._warm_up(forward)
            graph, result = self._record(forward)

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return result

        return replay

    def _record(self, forward: Forward) -> tuple[Any, Tensor]:
        graph: Any = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            # "thread_local": what other threads do meanwhile, on other streams, is no part of it and no error.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                return graph, forward()
        finally:
            torch.cuda.set_stream(before)  # torch leaves the other one in place where recording fails

    def _warm_up(self, forward: Forward) -> None:
        """Twice: kernels are compiled and workspaces made in the first run, and the second one shows whether it waits
        for the device. To find that out while recording would leave torch's random generators in the middle of it.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()
            with no_waiting(_waits_are_told):
                forward()
        torch.cuda.current_stream().wait_stream(self._stream)


@contextlib.contextmanager
def no_waiting(told: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Raises UnsupportedModelError at the end where torch warned of a wait of this thread; `told` lets it warn."""
    waits: list[str] = []
    thread, show = threading.get_ident(), warnings.showwarning

    def note(message: Warning | str, *where: Any, **more: Any) -> None:
        if WAIT in str(message) and threading.get_ident() == thread:
            stack = traceback.extract_stack()[:-1]
            if not any(frame.name in compat.LEFT_OUT_OF_GRAPHS for frame in stack):
                waits.append(_place(stack))
        else:
            show(message, *where, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{WAIT}")
        warnings.showwarning = note
        with told():
            yield
    if waits:
        raise UnsupportedModelError(
            f"the forward waits for the device {len(waits)} times (first in {waits[0]}), which a recorded one cannot; "
            "its decode steps are launched one by one"
        )


def _place(stack: list[traceback.FrameSummary]) -> str:
    """Where code that is not torch's asked for what torch warned of."""
    theirs = {"torch", "warnings.py"}
    frame = next((frame for frame in reversed(stack) if not theirs & {*Path(frame.filename).parts}), stack[-1])
    return f"{frame.name}, {Path(frame.filename).name}, line {frame.lineno}"


@contextlib.contextmanager
def _waits_are_told() -> Iterator[None]:
    """torch warns of each wait, in all threads: to raise would break what others do."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
