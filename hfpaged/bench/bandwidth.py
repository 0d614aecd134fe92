"""Row bandwidth: how fast decode attention reads keys and values, against what the memory gives."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import hfpaged_kernels
import torch
from torch import Tensor

from hfpaged.bench.generation import first_tokens
from hfpaged.bench.random_prompts import random_ids
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PAGED
from hfpaged.measure import alternate
from hfpaged.paged_layer import PagedLayer

SUM_BYTES, QUICK_SUM_BYTES = 256_000_000, 16_000_000
READS = 5  # at least; one read takes milliseconds


@dataclass(frozen=True)
class Layer:
    """The operands of one decode kernel, with blocks of keys and values of its own."""

    query: Tensor
    key: Tensor
    value: Tensor
    tables: Tensor
    lengths: Tensor

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def decode(self) -> Tensor:
        arguments = (self.query, self.key, self.value, self.tables, self.lengths)
        return hfpaged_kernels.decode(*arguments, scale=self.query.shape[-1] ** -0.5)


def measure(setting: Setting, shape: Shape) -> Measured:
    """Enough layers that both sides read as much: what lies in a processor's cache from before helps neither."""
    size = QUICK_SUM_BYTES if setting.is_quick else SUM_BYTES
    like = _stored_layer(setting)
    layers = [_random_layer(setting, shape, like)]
    layers += [_random_layer(setting, shape, like) for _ in range(size // layers[0].nbytes)]
    numbers = torch.ones(size // 4, device=setting.device)

    def decode() -> None:
        for layer in layers:
            layer.decode()
        setting.synchronize()

    runs = {"sum": lambda: numbers.sum().item(), "decode": decode}
    times = alternate(runs, max(READS, setting.repeats))
    read = {"sum": numbers.nbytes, "decode": sum(layer.nbytes for layer in layers)}
    speed = {name: read[name] / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    note = f"{speed['decode']:.1f} of {speed['sum']:.1f} GB/s"
    return Measured(speed["decode"] / speed["sum"], note=note)


def _stored_layer(setting: Setting) -> Any:
    """The store of the model's first paged layer: its heads, dims, dtype and block size."""
    PAGED.switch(setting.model)
    cache = PAGED.make_cache(setting.model)
    first_tokens(setting.model, random_ids(setting, 1, 2), cache)
    return next(layer for layer in cache.layers if isinstance(layer, PagedLayer))._store


def _random_layer(setting: Setting, shape: Shape, like: Any) -> Layer:
    _, kv_heads, block_size, dim = like.key.shape
    per_sequence = -(-shape.prompt // block_size)
    count = shape.batch * per_sequence
    options: dict[str, Any] = {"dtype": like.key.dtype, "device": setting.device}
    tables = torch.randperm(count, dtype=torch.int32, device=setting.device).view(shape.batch, per_sequence)
    return Layer(
        query=torch.randn(shape.batch, setting.text_config.num_attention_heads, dim, **options),
        key=torch.randn(count, kv_heads, block_size, dim, **options),
        value=torch.randn(count, kv_heads, block_size, like.value.shape[3], **options),
        tables=tables,
        lengths=torch.full((shape.batch,), shape.prompt, dtype=torch.int32, device=setting.device),
    )
