"""How a forward is recorded: what runs before, what is refused, and what is put back. The device is a stand-in."""

from __future__ import annotations

import contextlib
import threading
import warnings
from unittest import mock

import pytest
import torch

from hfpaged.engine.cuda_capture import CudaCapture, no_waiting
from hfpaged.errors import UnsupportedModelError

DEVICE = torch.device("cuda", 0)
WAIT = "called a synchronizing CUDA operation (Triggered internally at somewhere)"


class Cuda:
    """What of torch.cuda is called, written down."""

    def __init__(self):
        self.calls, self.stream_now, self.debug, self.pools = [], "main", 0, []
        self.Stream = mock.Mock()
        self.CUDAGraph = mock.Mock()

    def device(self, device):
        return contextlib.nullcontext()

    def graph_pool_handle(self):
        return "pool"

    def current_stream(self):
        return MAIN if self.stream_now == "main" else mock.Mock()

    def set_stream(self, stream):
        self.stream_now = "main" if stream is MAIN else "side"

    @contextlib.contextmanager
    def stream(self, stream):
        self.stream_now = "side"
        try:
            yield
        finally:
            self.stream_now = "main"

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.pools.append((pool, stream))
        self.stream_now = "side"
        self.calls.append("begin")
        yield  # torch leaves the stream in place where this raises
        self.calls.append("end")
        self.stream_now = "main"

    def get_sync_debug_mode(self):
        return self.debug

    def set_sync_debug_mode(self, mode):
        self.debug = mode


MAIN = mock.Mock()


@pytest.fixture
def cuda():
    stand_in = Cuda()
    with mock.patch.object(torch, "cuda", stand_in):
        yield stand_in


def test_a_forward_is_run_twice_and_recorded_once(cuda):
    result = torch.zeros(1)

    def forward():
        cuda.calls.append(f"forward on {cuda.stream_now}, {cuda.debug}")
        return result

    capture = CudaCapture(DEVICE)
    replay = capture(forward)
    assert cuda.calls == ["forward on side, 0", "forward on side, warn", "begin", "forward on side, 0", "end"]
    assert replay() is result
    cuda.CUDAGraph().replay.assert_called_once_with()
    capture(forward)
    assert len(cuda.pools) == 2
    assert len(set(cuda.pools)) == 1
    assert cuda.stream_now == "main"


def test_a_forward_that_waits_is_refused_before_it_is_recorded(cuda):
    def forward():
        if cuda.debug == "warn":
            warnings.warn(WAIT, stacklevel=1)

    with pytest.raises(UnsupportedModelError, match=r"waits for the device 1 times \(first in forward, test_cuda"):
        CudaCapture(DEVICE)(forward)
    assert cuda.calls == []
    assert (cuda.stream_now, cuda.debug) == ("main", 0)


def test_where_recording_fails_the_stream_of_before_is_put_back(cuda):
    def forward():
        if "begin" in cuda.calls:
            raise RuntimeError("operation not permitted when stream is capturing")

    capture = CudaCapture(DEVICE)
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(forward)
    assert cuda.stream_now == "main"
    cuda.calls.clear()
    capture(lambda: torch.zeros(1))  # nobody holds the lock


def test_waits_that_a_recorded_forward_leaves_out_do_not_count():
    def warn_if_padding_and_no_attention_mask():
        warnings.warn(WAIT, stacklevel=1)

    with no_waiting(contextlib.nullcontext):
        warn_if_padding_and_no_attention_mask()


def test_waits_of_other_threads_are_theirs():
    with pytest.warns(UserWarning, match="synchronizing"), no_waiting(contextlib.nullcontext):  # noqa: PT031
        thread = threading.Thread(target=warnings.warn, args=(WAIT,))
        thread.start()
        thread.join()


def test_other_warnings_are_shown():
    with pytest.warns(UserWarning, match="of something else"), no_waiting(contextlib.nullcontext):
        warnings.warn("of something else", stacklevel=1)
