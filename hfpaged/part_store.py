"""Keys or values of one layer in memory: blocks, and the residuals of formats that have some."""

from __future__ import annotations

import hfpaged_kernels as kernels
import torch
from hfpaged_kernels import Encoding, QuantizedCache
from hfpaged_kernels.quantizing import read_blocks
from torch import Tensor

from hfpaged.filling import Filling
from hfpaged.kv_format import Part, block_shape, storage_dtype
from hfpaged.step import Step


class PartStore:
    """`data` is [num_blocks, num_kv_heads, block_size, dim], the heads before the tokens: a kernel reads one head of
    one block in one run of memory; what is quantized is [num_blocks, num_kv_heads, bytes]. Residuals are
    [num_residuals, block_size, num_kv_heads, dim].
    """

    def __init__(self, like: Tensor, block_size: int, part: Part, has_residuals: bool, scales: Tensor | None) -> None:
        _, heads, _, self._dim = like.shape
        self._block_size, self._part = block_size, part
        self._dtype = like.dtype
        self._scales = None if scales is None else scales.to(like.device, torch.float32)
        shape = block_shape(part, heads, block_size, self._dim)
        self.data = _empty((0, *shape), storage_dtype(part, like.dtype), like.device)
        self.residual: Tensor | None = None
        if has_residuals and isinstance(part, Encoding):
            self.residual = _empty((0, block_size, heads, self._dim), like.dtype, like.device)
        self.cache = self._make_cache()

    @property
    def num_blocks(self) -> int:
        return len(self.data)

    def has_room(self, num_blocks: int, num_residuals: int) -> bool:
        return num_blocks <= len(self.data) and (self.residual is None or num_residuals <= len(self.residual))

    @property
    def block_bytes(self) -> int:
        return self.data.element_size() * self.data.shape[1:].numel()

    @property
    def residual_bytes(self) -> int:
        return 0 if self.residual is None else self.residual.element_size() * self.residual.shape[1:].numel()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.residual is None else self.residual.nbytes)

    def grow(self, num_blocks: int, num_residuals: int) -> None:
        """Make room for so many in all; what is stored stays."""
        self.data = _grown(self.data, num_blocks)
        if self.residual is not None:
            self.residual = _grown(self.residual, num_residuals)
        self.cache = self._make_cache()

    def fill(self, rows: Tensor, filling: Filling) -> None:
        """What is left to do of a step once its tokens are in residuals: quantize what is full."""
        assert isinstance(self.cache, QuantizedCache)
        assert self.residual is not None
        if len(filling.filled):
            kernels.write_blocks(self.residual.flatten(0, 1), self.cache, filling.filled, filling.filled_rows)
        if len(filling.whole):
            kernels.write_blocks(rows, self.cache, filling.whole, filling.whole_rows)

    def reopen(self, reopened: Tensor) -> None:
        """Read full blocks back into residuals, as something is to be written into the middle of them: [n, 2]."""
        if len(reopened) and self.residual is not None:
            assert isinstance(self.cache, QuantizedCache)
            blocks, residuals = reopened.unbind(1)
            self.residual[residuals] = read_blocks(self.cache, blocks).transpose(1, 2).to(self._dtype)

    def set_bytes(self, blocks: list[int], byte: int) -> None:
        """Let each byte of these blocks be `byte`."""
        with torch.no_grad():
            self.data.view(torch.uint8)[torch.tensor(blocks, device=self.data.device)] = byte

    def block_bytes_of(self, blocks: list[int]) -> Tensor:
        """[blocks, bytes] uint8: what lies in them."""
        return self.data[torch.tensor(blocks, dtype=torch.int64, device=self.data.device)].flatten(1).view(torch.uint8)

    def copy_residuals(self, pairs: list[tuple[int, int]]) -> None:
        """(source, target) each."""
        if self.residual is not None and pairs:
            sources, targets = torch.tensor(pairs, device=self.residual.device).unbind(1)
            self.residual[targets] = self.residual[sources]

    def _make_cache(self) -> kernels.Cache:
        if not isinstance(self._part, Encoding):
            return self.data
        return QuantizedCache(
            self.data, self._part, self._block_size, self._dim, self._dtype, self._scales, self.residual
        )  # fmt: skip


def write_step(key: Tensor | None, value: Tensor | None, keys: PartStore, values: PartStore, step: Step) -> None:
    """Store the new tokens of a step, [num_tokens, num_kv_heads, dim]; what is None stays as it is."""
    if step.filling is None and key is not None and value is not None:  # formats without residuals, at every step
        return kernels.write_kv(key, value, keys.cache, values.cache, step.slots)
    both = [(rows, part) for rows, part in ((key, keys), (value, values)) if rows is not None]
    _write([(rows, part.cache) for rows, part in both if part.residual is None], step.slots)
    through = [(rows, part, part.residual) for rows, part in both if part.residual is not None]
    if not through:
        return None
    assert step.filling is not None
    for _, part, _ in through:
        part.reopen(step.filling.reopened)
    _write([(rows, residual.transpose(1, 2)) for rows, _, residual in through], step.filling.slots)
    for rows, part, _ in through:
        part.fill(rows, step.filling)
    return None


def _write(targets: list[tuple[Tensor, kernels.Cache]], slots: Tensor) -> None:
    """One of keys and values, or both in one call."""
    if targets:
        (key, key_cache), (value, value_cache) = targets[0], targets[-1]
        kernels.write_kv(key, value, key_cache, value_cache, slots)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All memory of a pool comes from here."""
    # Outside of inference mode, so that a pool made in one mode can be written in the other.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _grown(old: Tensor, count: int) -> Tensor:
    if count <= len(old):
        return old
    new = _empty((count, *old.shape[1:]), old.dtype, old.device)
    with torch.inference_mode(False), torch.no_grad():
        new[: len(old)] = old
        return new
