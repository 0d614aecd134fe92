"""What the tests of the compiled kernels share."""

from __future__ import annotations

import numba
import pytest
import torch
from hfpaged_kernels import cpu_threads


@pytest.fixture
def two_threads_here_one_for_the_judge(monkeypatch):
    """Plain torch's many small operations lose time on two threads, above all on a busy machine."""
    before = torch.get_num_threads()
    cpu_threads.threading_layer()
    shares, ours = min(2, numba.config.NUMBA_NUM_THREADS), numba.get_num_threads()
    numba.set_num_threads(shares)  # the kernels would take torch's number
    monkeypatch.setattr(cpu_threads, "_threads", lambda: 2)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(ours)
    torch.set_num_threads(before)
