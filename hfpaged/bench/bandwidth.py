"""Row bandwidth: how fast decode attention reads keys and values, against what the memory gives."""

from __future__ import annotations

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
from hfpaged.bench.turns import in_pairs
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

    def decode(self, **options: Any) -> Tensor:
        arguments = (self.query, self.key, self.value, self.tables, self.lengths)
        return hfpaged_kernels.decode(*arguments, scale=self.query.shape[-1] ** -0.5, **options)


def measure(setting: Setting, shape: Shape) -> Measured:
    """Enough layers that both sides read as much: what lies in a processor's cache from before helps neither."""
    size = QUICK_SUM_BYTES if setting.is_quick else SUM_BYTES
    like = stored_layer(setting)
    layers = [_random_rows(setting, shape, like)]
    layers += [_random_rows(setting, shape, like) for _ in range(size // layers[0].nbytes)]
    numbers = torch.ones(size // 4, device=setting.device)

    def decode() -> None:
        for layer in layers:
            layer.decode()
        setting.synchronize()

    runs = {"sum": lambda: numbers.sum().item(), "decode": decode}
    times = alternate(runs, max(READS, setting.repeats))
    read = {"sum": numbers.nbytes, "decode": sum(layer.nbytes for layer in layers)}
    speeds = {name: [read[name] / each / 1e9 for each in seconds] for name, seconds in times.items()}
    found = in_pairs(speeds["sum"], speeds["decode"], "GB/s", None)
    note = f"{found.paged:.1f} of {found.plain:.1f} GB/s"
    return Measured(found.value, note=note, values=found.values)  # none of both is plain transformers


def stored_layer(setting: Setting) -> Any:
    """The store of the model's first paged layer: its heads, dims, dtype and block size."""
    PAGED.switch(setting.model)
    cache = PAGED.make_cache(setting.model)
    first_tokens(setting.model, random_ids(setting, 1, 2), cache)
    return next(layer for layer in cache.layers if isinstance(layer, PagedLayer))._store


def random_layer(setting: Setting, like: Any, tables: Tensor, length: int) -> Layer:
    """Random numbers in the blocks of `tables` ([batch, blocks] of int32), `length` tokens for each row."""
    _, kv_heads, block_size, dim = like.key.shape
    batch, count = len(tables), int(tables.max()) + 1
    options: dict[str, Any] = {"dtype": like.key.dtype, "device": setting.device}
    return Layer(
        query=torch.randn(batch, setting.text_config.num_attention_heads, dim, **options),
        key=torch.randn(count, kv_heads, block_size, dim, **options),
        value=torch.randn(count, kv_heads, block_size, like.value.shape[3], **options),
        tables=tables,
        lengths=torch.full((batch,), length, dtype=torch.int32, device=setting.device),
    )


def _random_rows(setting: Setting, shape: Shape, like: Any) -> Layer:
    per_sequence = -(-shape.prompt // like.key.shape[2])
    tables = torch.randperm(shape.batch * per_sequence, dtype=torch.int32, device=setting.device)
    return random_layer(setting, like, tables.view(shape.batch, per_sequence), shape.prompt)
