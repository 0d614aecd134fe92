"""The contents of blocks as rows of bytes in host memory: what is moved out of a pool, and back into it.

In a row stand the layers of the block's layer group, keys and values, codes and scales as they lie in the pool:

    | layer 0 key | layer 0 value | layer 1 key | ...     each part begins at a multiple of 16 bytes

so that a block is one run of memory for the device that copies it, and for whoever writes it down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.device_copies import DeviceCopies
from hfpaged.device_timer import DeviceTimer
from hfpaged.kv_storage import LayerStore
from hfpaged.layer_groups import LayerGroup

PARTS = ("key", "value")
_ALIGNMENT = 16

Stores = Mapping[int, Many[LayerStore]]
Told = Callable[[int, float], None]


@dataclass(frozen=True)
class RowPart:
    """Where keys or values of one layer stand in a row. `kind` counts the stores of a layer that has several."""

    layer: int
    kind: int
    name: str  # "key" or "value"
    store: LayerStore
    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def of(self, rows: Tensor) -> Tensor:
        """[n, ...]: this part of `rows`, uint8 [n, bytes], as `LayerStore.contents` has it."""
        contents = self.store.contents(self.name)
        return rows[:, self.start : self.stop].view(contents.dtype).unflatten(1, contents.shape[1:])


class BlockRows:
    """What lies where in the rows of each layer group, as `stores` are now. `told(bytes, seconds)` hears how long it
    takes to put rows back.
    """

    def __init__(
        self,
        groups: Many[LayerGroup],
        stores: Stores,
        told: Callable[[int, float], None] = lambda nbytes, seconds: None,
    ) -> None:
        self._parts = [_lay_out(group, stores) for group in groups]
        self._key = _key(groups, stores)
        self._timer = DeviceTimer(told)
        self._copies = DeviceCopies(self._timer)
        ends = [parts[-1].stop if parts else 0 for parts in self._parts]
        self._bytes = [sum(part.nbytes for part in parts) for parts in self._parts]
        self.nbytes = _aligned(max(ends, default=0))  # of a row of any group

    def fits(self, groups: Many[LayerGroup], stores: Stores) -> bool:
        """Whether the pool has no other stores by now."""
        return self._key == _key(groups, stores)

    @property
    def is_pinned(self) -> bool:
        """Whether a device copies from and to rows by itself, which wants memory that stays in its place."""
        return any(part.store.key.device.type == "cuda" for parts in self._parts for part in parts)

    def parts(self, group: int) -> Many[RowPart]:
        """What stands in a row of a layer group, in order."""
        return self._parts[group]

    def bytes_of(self, group: int) -> int:
        """What is moved of a block of a layer group."""
        return self._bytes[group]

    def make(self, count: int) -> Tensor:
        """[count, bytes] uint8 with nothing in them yet. Raises RuntimeError or MemoryError where there is no room."""
        with torch.inference_mode(False):
            return torch.empty(count, self.nbytes, dtype=torch.uint8, pin_memory=self.is_pinned)

    def take(self, group: int, blocks: Many[int], rows: Tensor, places: Many[int]) -> None:
        """Copy what is in `blocks` into `rows[places]`. From devices that do so beside their work: `settle` waits."""
        for device, parts in self._by_device(group):
            if device.type == "cuda":
                self._copies.take(device, parts, blocks, rows, places)
                continue
            for part in parts:
                with part.store.open(part.name) as data:
                    if len(data):
                        _words(rows, part)[places] = _taken(data, _within(blocks, len(data)), part)

    def put(self, group: int, rows: Tensor, places: Many[int], blocks: Many[int]) -> None:
        """Copy `rows[places]` into `blocks`, which there must be room for. What is computed next sees it."""
        for device, parts in self._by_device(group):
            if device.type == "cuda":
                self._copies.put(device, parts, rows, places, blocks)
                continue
            timed = self._timer.begin(len(blocks) * sum(part.nbytes for part in parts), device)
            for part in parts:
                if device.type == "cpu":
                    with part.store.open(part.name) as data:
                        _words_of(data, part)[blocks] = _words(rows, part)[places]
                else:
                    part.store.fill(part.name, list(blocks), part.of(rows[list(places)]))
            self._timer.end(timed)

    def settle(self) -> None:
        """Wait until all rows hold what was taken."""
        self._copies.settle()

    def _by_device(self, group: int) -> Iterator[tuple[torch.device, list[RowPart]]]:
        for device, parts in groupby(self._parts[group], key=lambda part: part.store.key.device):
            yield device, list(parts)


def _within(blocks: Many[int], count: int) -> Many[int]:
    """Where layers keep several kinds of keys, a block may lie beyond the `count` blocks of a kind that it is not of;
    what is taken from there is nobody's, and any block will do.
    """
    return blocks if max(blocks, default=0) < count else [min(block, count - 1) for block in blocks]


def _lay_out(group: LayerGroup, stores: Stores) -> list[RowPart]:
    """Those of one device beside each other."""
    kinds = [(layer, kind, store) for layer in group.layers for kind, store in enumerate(stores.get(layer, ()))]
    parts: list[RowPart] = []
    for layer, kind, store in sorted(kinds, key=lambda each: str(each[2].key.device)):
        for name in PARTS:
            contents = store.contents(name)
            nbytes = contents.element_size() * math.prod(contents.shape[1:])
            start = _aligned(parts[-1].stop) if parts else 0
            parts.append(RowPart(layer, kind, name, store, start, nbytes))
    return parts


def _key(groups: Many[LayerGroup], stores: Stores) -> tuple[tuple[int, int], ...]:
    return tuple((layer, id(store)) for group in groups for layer in group.layers for store in stores.get(layer, ()))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# torch copies chosen rows of bytes one by one; NumPy copies them word by word, four times as fast.
def _words(rows: Tensor, part: RowPart) -> npt.NDArray[Any]:
    """[n, words] over the memory of a part of all rows."""
    return rows[:, part.start : part.stop].numpy().view(_word(part))


def _words_of(data: Tensor, part: RowPart) -> npt.NDArray[Any]:
    """[blocks, words] over the memory of a store in host memory."""
    return data.detach().flatten(1).view(torch.uint8).numpy().view(_word(part))


def _taken(data: Tensor, blocks: Many[int], part: RowPart) -> npt.NDArray[Any]:
    """[blocks, words]: a copy in host memory."""
    if data.device.type == "cpu":
        return np.asarray(_words_of(data, part)[list(blocks)])
    return _words_of(data.detach().index_select(0, torch.tensor(blocks, device=data.device)).cpu(), part)


def _word(part: RowPart) -> type[np.generic]:
    return np.int64 if part.nbytes % 8 == 0 else np.uint8
