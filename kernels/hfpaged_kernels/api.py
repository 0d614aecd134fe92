"""The public functions: they check shapes once and pick the form of the kernel by device.

Triton on GPUs, numba on CPUs, plain torch where neither can run. Shapes are those of `reference`.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from types import ModuleType

import torch
from torch import Tensor

from hfpaged_kernels import reference
from hfpaged_kernels.quantized import Cache, QuantizedCache

logger = logging.getLogger("hfpaged.kernels")


def backend(device: torch.device) -> str:
    """ "triton", "numba" or "torch": the form that runs for tensors on `device`."""
    return _form(device.type).__name__.rsplit(".", 1)[-1].removesuffix("_form").replace("reference", "torch")


def write_kv(key: Tensor, value: Tensor, key_cache: Cache, value_cache: Cache, slots: Tensor) -> None:
    """Store new keys and values ([num_tokens, num_kv_heads, dim]) at their slots. See `reference.write_kv`."""
    _form(key_cache.device.type).write_kv(key, value, key_cache, value_cache, slots)


def write_blocks(rows: Tensor, cache: QuantizedCache, blocks: Tensor, sources: Tensor) -> None:
    """Quantize whole blocks from rows [num_rows, num_kv_heads, dim]. See `reference.write_blocks`."""
    _form(cache.device.type).write_blocks(rows, cache, blocks, sources)


def copy_blocks(key_cache: Cache, value_cache: Cache, sources: Tensor, targets: Tensor) -> None:
    """Copy whole blocks inside the caches. See `reference.copy_blocks`."""
    _form(key_cache.device.type).copy_blocks(key_cache, value_cache, sources, targets)


def gather(cache: Cache, block_tables: Tensor, lengths: Tensor, residuals: Tensor | None = None) -> Tensor:
    """The dense view [num_seqs, num_kv_heads, longest, dim] of paged context. See `reference.gather`."""
    result: Tensor = _form(cache.device.type).gather(cache, block_tables, lengths, residuals)
    return result


def decode(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared_blocks: int = 0,
    residuals: Tensor | None = None,
) -> Tensor:
    """One query token per sequence over its paged context. See `reference.decode`.

    Say `shared_blocks` whenever it is known: where reading the common blocks once is not faster, it is not done.
    """
    result: Tensor = _form(key_cache.device.type).decode(
        query, key_cache, value_cache, block_tables, context_lengths,
        scale=scale, window=window, softcap=softcap, sinks=sinks, shared_blocks=shared_blocks, residuals=residuals,
    )  # fmt: skip
    return result


def prefill(
    query: Tensor,
    key_cache: Cache,
    value_cache: Cache,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    residuals: Tensor | None = None,
) -> Tensor:
    """Ragged, causal query tokens over their paged context. See `reference.prefill`."""
    result: Tensor = _form(key_cache.device.type).prefill(
        query, key_cache, value_cache, block_tables, context_lengths, query_starts, query_lengths,
        scale=scale, window=window, softcap=softcap, sinks=sinks, residuals=residuals,
    )  # fmt: skip
    return result


@functools.cache
def _form(device_type: str) -> ModuleType:
    if device_type == "cpu":
        return _numba_or_torch()
    if device_type in ("cuda", "xpu") and importlib.util.find_spec("triton"):
        return importlib.import_module("hfpaged_kernels.triton_form")
    logger.warning("hfpaged has no kernels of its own for device type %r: plain torch does it", device_type)
    return reference


def _numba_or_torch() -> ModuleType:
    if importlib.util.find_spec("numba"):
        return importlib.import_module("hfpaged_kernels.numba_form")
    logger.warning("numba is not installed: plain torch does the attention on CPU, slower. pip install numba")
    return reference
