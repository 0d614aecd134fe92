"""What transformers' own layers keep of one sequence beside keys and values: convolution and recurrent states, keys of
indexers. It lies in no block, so it goes with the sequence.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor


class _Held:
    """Layers by index, and how many sequences have them."""

    __slots__ = ("holders", "layers")

    def __init__(self, layers: dict[int, Any]) -> None:
        self.layers, self.holders = layers, 1


class LayerStates:
    """The layers of one sequence. Forks share them until one of them goes on: models change states in place."""

    __slots__ = ("_held",)

    def __init__(self, layers: dict[int, Any]) -> None:
        self._held = _Held(layers)

    def fork(self) -> LayerStates:
        """The same for another sequence; nothing is copied yet."""
        child = object.__new__(LayerStates)
        child._held = self._held
        self._held.holders += 1
        return child

    def drop(self) -> None:
        """The sequence is gone; who is left alone with the layers need not copy them."""
        self._held.holders -= 1

    def own(self) -> dict[int, Any]:
        """The layers by index, nobody else's, for a forward to change."""
        if self._held.holders > 1:
            layers = copy.deepcopy(self._held.layers)
            self._held.holders -= 1
            self._held = _Held(layers)
        return self._held.layers

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the layers."""
        return self.bytes_by_device.total()

    @property
    def bytes_by_device(self) -> Counter[torch.device]:
        """The same, by device."""
        sizes: Counter[torch.device] = Counter()
        for layer in self._held.layers.values():
            for tensor in _tensors(vars(layer)):
                sizes[tensor.device] += tensor.nbytes
        return sizes


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in inside for tensor in _tensors(each)]
