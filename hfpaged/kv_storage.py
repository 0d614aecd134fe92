"""The tensors behind the block pool. The storage knows blocks and layers, no sequence."""

from __future__ import annotations

import threading

import hfpaged_kernels as kernels
import torch
from torch import Tensor

from hfpaged.block_table import BlockCopy
from hfpaged.errors import CacheMismatchError
from hfpaged.kv_format import KVFormat

# A growing pool gets an eighth more than it needs now, so that it is not copied at every step.
GROWTH = 1.125


class LayerStore:
    """One key and one value tensor [num_blocks, num_kv_heads, block_size, dim], the heads before the tokens:
    a kernel reads one head of one block in one run of memory.
    """

    def __init__(self, key: Tensor, value: Tensor, block_size: int, kv_format: KVFormat) -> None:
        self.signature = signature(key, value)
        self._block_size = block_size
        # Two caches of one pool may run in two threads: growing must not lose what the other one writes.
        self._lock = threading.Lock()
        self.key = _empty(key, 0, block_size, kv_format)
        self.value = _empty(value, 0, block_size, kv_format)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return sum(t.shape[1] * t.shape[2] * t.shape[3] * t.element_size() for t in (self.key, self.value))

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def reserve(self, num_blocks: int, limit: int) -> None:
        """Hold at least `num_blocks`, at most `limit` blocks; what is stored stays."""
        if num_blocks <= len(self.key):
            return
        with self._lock:
            if num_blocks > len(self.key):  # another thread may have grown it meanwhile
                target = max(num_blocks, min(limit, int(num_blocks * GROWTH)))
                self.key, self.value = _grown(self.key, target), _grown(self.value, target)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store [num_tokens, num_kv_heads, dim] at `slots` (int64, -1 = not stored)."""
        with self._lock:
            kernels.write_kv(key, value, self.key, self.value, slots)

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Make the copies of a copy-on-write."""
        device = self.key.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        with self._lock:
            kernels.copy_blocks(self.key, self.value, sources, targets)

    def fill(self, part: str, blocks: list[int], contents: Tensor) -> None:
        """Put `contents` [len(blocks), num_kv_heads, block_size, dim] into whole blocks of "key" or "value"."""
        with self._lock, torch.no_grad():
            stored: Tensor = getattr(self, part)
            stored[torch.tensor(blocks, device=stored.device)] = contents.to(stored.device)


class KVStorage:
    """The stores of all layers. A store belongs to a place in the layer groups; groups share it where their
    layers have equal shapes, dtypes and devices. It is made when its first key arrives.
    """

    def __init__(self, block_size: int, kv_format: KVFormat) -> None:
        self._block_size = block_size
        self._format = kv_format
        self._stores: dict[tuple[int, object], LayerStore] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take now."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def num_stores(self) -> int:
        return len(self._stores)

    @property
    def block_bytes(self) -> int:
        """Bytes that one more block takes in all stores that exist by now."""
        return sum(store.block_bytes for store in self._stores.values())

    def store(self, place: int, key: Tensor, value: Tensor) -> LayerStore:
        """The store for the layer at `place` of its group whose first keys and values are these."""
        with self._lock:
            where = (place, signature(key, value))
            if where not in self._stores:
                self._stores[where] = LayerStore(key, value, self._block_size, self._format)
            return self._stores[where]


def signature(key: Tensor, value: Tensor) -> tuple[object, ...]:
    """What must stay the same from one key to the next: heads, dims, dtypes, device."""
    return (key.shape[1], key.shape[3], value.shape[3], key.dtype, value.dtype, key.device)


def check_signature(store: LayerStore, key: Tensor, value: Tensor, layer: int) -> None:
    """Raises CacheMismatchError when keys [batch, num_kv_heads, length, dim] are not of the stored kind."""
    if signature(key, value) != store.signature:
        raise CacheMismatchError(
            f"layer {layer} of this cache holds (KV heads, key dim, value dim, dtypes, device) = "
            f"{_words(store.signature)}, and was given {_words(signature(key, value))}: "
            "a cache serves one model; make a PagedCache for each"
        )


def _words(parts: tuple[object, ...]) -> str:
    return "(" + ", ".join(str(part) for part in parts) + ")"


def _empty(like: Tensor, num_blocks: int, block_size: int, kv_format: KVFormat) -> Tensor:
    # Outside of inference mode, so that a pool made in one mode can be written in the other.
    with torch.inference_mode(False):
        shape = (num_blocks, like.shape[1], block_size, like.shape[3])
        return torch.empty(shape, dtype=kv_format.storage_dtype(like.dtype), device=like.device)


def _grown(old: Tensor, num_blocks: int) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        new = old.new_empty(num_blocks, *old.shape[1:])
        new[: len(old)] = old
        return new
