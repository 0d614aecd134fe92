"""Catches what `triton_form` launches, so that it can be compiled for a device that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from hfpaged_kernels import triton_form, triton_launch
from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import Cache, QuantizedCache
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source

KERNELS = (
    "write_kv_kernel",
    "copy_blocks_kernel",
    "gather_kernel",
    "decode_kernel",
    "merge_kernel",
    "prefill_kernel",
    "shared_kernel",
    "write_blocks_kernel",
)
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Stands for a kernel: kernel[grid](...) is written down and not run."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        arguments = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
        assert set(arguments) == set(self._kernel.arg_names)
        self._launches.append(Launch(self._kernel, arguments, options))


@contextlib.contextmanager
def recorded(splits: int) -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    with contextlib.ExitStack() as stack:
        for name in KERNELS:
            kernel = getattr(triton_form, name)
            stack.enter_context(mock.patch.object(triton_form, name, Recorder(kernel, launches)))
        stack.enter_context(mock.patch.object(triton_launch, "num_splits", return_value=splits))
        yield launches


def compiled(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Compiles ahead of time what a launch would compile: the same constants, alignments and options."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    alignments: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if name.isupper() or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[name] = _type(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            alignments[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, alignments)
    return compile_source(source, target=target, options=launch.options)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def launches_of_every_operation(
    dtype: torch.dtype, key_dim: int, value_dim: int, group: int = 4, block_size: int = 16,
    encodings: tuple[Encoding | None, Encoding | None] = (None, None),
) -> list[Launch]:  # fmt: skip
    """Decode with and without splits and shared blocks, merge, prefill, write, copy and gather; all options of
    attention on, save that shared blocks and a window do not go together. With encodings, unfilled blocks lie in
    residuals, and blocks are quantized as well as tokens."""
    caches = tuple(
        _cache(dtype, dim, block_size, encoding)
        for dim, encoding in zip((key_dim, value_dim), encodings, strict=True)
    )  # fmt: skip
    key, value = torch.zeros(2, 2, key_dim, dtype=dtype), torch.zeros(2, 2, value_dim, dtype=dtype)
    query = torch.zeros(2, 2 * group, key_dim, dtype=dtype)
    tables = torch.zeros(2, 2, dtype=torch.int32)
    lengths = torch.full((2,), 5, dtype=torch.int32)
    starts, ones = torch.arange(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    ids = torch.arange(2)
    attention = {
        "scale": 0.1, "window": 9, "softcap": 30.0, "sinks": torch.zeros(2 * group, dtype=dtype),
        "residuals": starts,
    }  # fmt: skip
    with recorded(splits=1) as launches:
        if "channel" not in (encoding and encoding.scales for encoding in encodings):
            triton_form.write_kv(key, value, *caches, ids)
        for rows, cache in zip((key, value), caches, strict=True):
            triton_form.gather(cache, tables, lengths, starts)
            if isinstance(cache, QuantizedCache):
                triton_form.write_blocks(rows, cache, ids[:1], torch.zeros(1, block_size, dtype=torch.int64))
        triton_form.copy_blocks(*caches, ids[:1], ids[1:])
        triton_form.decode(query, *caches, tables, lengths, **attention)
        triton_form.prefill(query, *caches, tables, lengths, starts, ones, **attention)
    with recorded(splits=4) as split_launches:
        triton_form.decode(query, *caches, tables, lengths, **attention)
        with mock.patch.object(triton_launch, "sharing_pays", return_value=True):
            triton_form.decode(query, *caches, tables, lengths, **attention | {"window": None}, shared_blocks=1)
    return launches + split_launches


def _cache(dtype: torch.dtype, dim: int, block_size: int, encoding: Encoding | None) -> Cache:
    if encoding is None:
        return torch.zeros(4, 2, block_size, dim, dtype=dtype)
    data = torch.zeros(4, 2, encoding.head_bytes(block_size, dim), dtype=torch.uint8)
    scales = torch.ones(2) if encoding.scales == "head" else None
    return QuantizedCache(
        data, encoding, block_size, dim, dtype, scales, residual=torch.zeros(2, block_size, 2, dim, dtype=dtype)
    )
