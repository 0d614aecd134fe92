"""What a quantized PagedCache should give, in dense tensors and with plain transformers: the judge of all formats.

Written from the words of the formats alone. Nothing of the pool, the tables or the fast kernels is used here, only the
plain torch functions that turn numbers into codes and back.

    first forward   a cache that is empty: attention sees the new keys and values as the model computed them
    later ones      attention sees everything, the new ones included, as it is stored
    stored          eight bits: each token by itself, at once; a format with four bits: blocks of `block_size` tokens,
                    counted from the first token of the row, each when it is full; until then as the model computed it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hfpaged_kernels import encoding
from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import QuantizedCache
from hfpaged_kernels.quantizing import read_blocks, write_blocks
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

EIGHT_BITS = {"int8": encoding.INT8, "fp8_e4m3": encoding.FP8_E4M3, "fp8_e5m2": encoding.FP8_E5M2}
KEYS = EIGHT_BITS | {"auto": None, "int4": encoding.INT4_CHANNEL}
VALUES = EIGHT_BITS | {"auto": None, "int4": encoding.INT4_GROUPS}
WHOLE = {name: (part, part) for name, part in ({"auto": None} | EIGHT_BITS).items()} | {
    "k8v4": (encoding.INT8, encoding.INT4_GROUPS),
    "int4": (encoding.INT4_CHANNEL, encoding.INT4),
}
Parts = tuple[Encoding | None, Encoding | None]


def parts_of(kv_dtype: Any, layer: int) -> Parts:
    """The encodings of keys and of values of one layer; None for as they are computed."""
    if isinstance(kv_dtype, Mapping):
        layers = {int(number): own for number, own in kv_dtype.get("layers", {}).items()}
        return parts_of(layers.get(layer, kv_dtype.get("default", "auto")), layer)
    if kv_dtype in WHOLE:
        return WHOLE[kv_dtype]
    key, value = kv_dtype.split("/")
    return KEYS[key], VALUES[value]


def through(states: Tensor, code: Encoding, head_scales: Tensor | None = None) -> Tensor:
    """[num_blocks, num_kv_heads, length, dim], blocks of that length, quantized and read back."""
    count, heads, length, dim = states.shape
    data = torch.zeros(count, heads, code.head_bytes(length, dim), dtype=torch.uint8)
    cache = QuantizedCache(data, code, length, dim, states.dtype, head_scales)
    where = torch.arange(count)
    write_blocks(states.transpose(1, 2).flatten(0, 1), cache, where, torch.arange(count * length).view(count, length))
    return read_blocks(cache, where).to(states.dtype)


class SimulatedLayer(DynamicLayer):
    """Keeps all positions, those that left its window too, so that they can be cropped."""

    def __init__(self, parts: Parts, block_size: int, window: int | None, starts: Tensor | None, scales: Any) -> None:
        super().__init__()
        self.parts, self.block_size, self.starts, self.scales = parts, block_size, starts, scales
        self.by_block = any(part is not None and part.bits < 8 for part in parts)
        self.window = self.sliding_window = window
        self.is_sliding = window is not None
        self.record_past = False

    def activate_past_recording(self) -> None:
        pass  # nothing is ever lost here

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        past = self.get_seq_length()
        offset = self.get_mask_sizes(key_states.shape[2])[1]
        super().update(key_states, value_states)
        if self.starts is None:
            self.starts = torch.zeros(len(key_states), dtype=torch.int64)
        self.starts = self.starts.repeat_interleave(len(key_states) // len(self.starts))  # generate() repeats rows
        self.keys, self.values = (
            self._stored(states.clone(), past, part, scales)
            for states, part, scales in zip((self.keys, self.values), self.parts, self.scales, strict=True)
        )
        if not past:
            return key_states, value_states
        return self.keys[:, :, offset:], self.values[:, :, offset:]

    def _stored(self, states: Tensor, past: int, part: Encoding | None, scales: Tensor | None) -> Tensor:
        if part is None:
            return states
        size = self.block_size if self.by_block else 1
        new = [
            (row, end - size)
            for row, start in enumerate(self.starts.tolist())
            for end in range(start + size, states.shape[2] + 1, size)
            if end > past
        ]
        if new:  # in one go, as each call takes its time
            rows, begins = torch.tensor(new).T[..., None]
            at = rows, slice(None), begins + torch.arange(size)
            states[at] = through(states[at].transpose(1, 2), part, scales).transpose(1, 2)
        return states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self.get_seq_length()
        offset = 0 if self.window is None else max(past - self.window + 1, 0)
        return past + query_length - offset, offset

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove <= -self.get_seq_length():
            self.reset()
        else:
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._choose(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._choose(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.starts = None if self.starts is None else self.starts.repeat_interleave(repeats)

    def _choose(self, indices: Tensor) -> None:
        self.starts = None if self.starts is None else self.starts[indices]


class SimulatedCache(DynamicCache):
    """For an unpatched model with transformers' own attention.

    `starts`: padding before the first token of each row, which blocks are counted from. Without, padding counts as
    tokens. `scales`: of the heads, by layer, for encodings with such.
    """

    def __init__(
        self, config: Any, kv_dtype: Any, block_size: int = 16, starts: list[int] | None = None,
        scales: Mapping[int, tuple[Tensor | None, Tensor | None]] | None = None, parts: Parts | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        begin = None if starts is None else torch.tensor(starts)
        self.layers = [
            SimulatedLayer(
                parts or parts_of(kv_dtype, number),
                block_size,
                layer.sliding_window if layer.is_sliding else None,
                begin,
                (scales or {}).get(number, (None, None)),
            )
            for number, layer in enumerate(self.layers)
        ]
