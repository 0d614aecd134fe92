"""What a CUDA graph does, on the CPU: the operations of a forward are written down and done again on the same tensors.

Nothing of Python runs when they are repeated, so that what the forward took from the host is as it was then, and a
forward that reads numbers of a tensor cannot be written down, as on a GPU.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import hfpaged_kernels
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# What makes the host wait for a device.
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
KERNELS = ("write_kv", "decode", "prefill", "gather", "copy_blocks")


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.is_on = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in WAITS or any(is_bool(index) for index in indices(func, args)):
            raise RuntimeError(f"{func} waits for the device, which cannot be recorded")
        return self.call(func, args, kwargs)

    def call(self, function, args, kwargs):
        if not self.is_on:
            return function(*args, **kwargs)
        self.is_on = False  # what a kernel does inside is a part of it
        try:
            out = function(*args, **kwargs)
        finally:
            self.is_on = True
        self.calls.append((function, args, kwargs, out))
        return out

    def repeat(self):
        with torch.no_grad():
            for function, args, kwargs, out in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tensors(out), tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():  # else a view, or written in place
                        old.copy_(new)


class Capture:
    """Stands for CudaCapture. `count` forwards have been recorded, and `repeats` of them done again."""

    def __init__(self):
        self.count = self.repeats = 0

    def __call__(self, forward):
        recording = Recording()
        forward()
        capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        with capturing, recording, kernels_in(recording):
            result = forward()
        self.count += 1

        def replay():
            self.repeats += 1
            recording.repeat()
            return result

        return replay


@contextlib.contextmanager
def kernels_in(recording):
    """Kernels of ours write into memory behind the back of torch: they are written down as a whole."""
    with contextlib.ExitStack() as stack:
        for name in KERNELS:
            stack.enter_context(
                mock.patch.object(hfpaged_kernels, name, recorded(recording, getattr(hfpaged_kernels, name)))
            )
        yield


def recorded(recording, kernel):
    return lambda *args, **kwargs: recording.call(kernel, args, kwargs)


def tensors(out):
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def indices(func, args):
    """Those by which a tensor is read or written."""
    return args[1] if func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default) else ()


def is_bool(index):
    return index is not None and index.dtype == torch.bool
