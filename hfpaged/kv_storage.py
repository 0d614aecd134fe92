"""The tensors behind the block pool. The storage knows blocks and layers, no sequence."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import hfpaged_kernels as kernels
import torch
from torch import Tensor

from hfpaged.block_table import BlockCopy
from hfpaged.errors import CacheMismatchError
from hfpaged.kv_format import KVFormat, check_dims
from hfpaged.part_store import PartStore, write_step
from hfpaged.step import Step

# A growing pool gets an eighth more than it needs now, so that it is not copied at every step.
GROWTH = 1.125

POISON = 255  # each byte of a block that was freed, in debug mode

# Scales of the heads of one layer, float32 [num_kv_heads], of keys and of values.
PartScales = tuple[Tensor | None, Tensor | None]
NO_SCALES: PartScales = (None, None)


class LayerStore:
    """Keys and values of one layer, or of the layers of several groups that are alike."""

    def __init__(
        self, key: Tensor, value: Tensor, block_size: int, kv_format: KVFormat, scales: PartScales = NO_SCALES
    ) -> None:
        self.signature = signature(key, value)
        # Two caches of one pool may run in two threads: growing must not lose what the other one writes.
        self._lock = threading.Lock()
        has_residuals = kv_format.has_residuals
        self._key = PartStore(key, block_size, kv_format.key, has_residuals, scales[0])
        self._value = PartStore(value, block_size, kv_format.value, has_residuals, scales[1])

    @property
    def key(self) -> kernels.Cache:
        """The keys as kernels take them."""
        return self._key.cache

    @property
    def value(self) -> kernels.Cache:
        """The values as kernels take them."""
        return self._value.cache

    @property
    def num_blocks(self) -> int:
        """Blocks that there is room for."""
        return self._key.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer, scales included."""
        return self._key.block_bytes + self._value.block_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of one residual of this layer; 0 for a format without any."""
        return self._key.residual_bytes + self._value.residual_bytes

    @property
    def nbytes(self) -> int:
        return self._key.nbytes + self._value.nbytes

    def contents(self, part: str) -> Tensor:
        """[num_blocks, ...]: what lies in the blocks of "key" or "value", codes and scales alike."""
        return self._part(part).data

    @contextmanager
    def open(self, part: str) -> Iterator[Tensor]:
        """`contents` to be written, which do not move meanwhile."""
        with self._lock:
            yield self._part(part).data

    def reserve(self, num_blocks: int, limit: int, num_residuals: int = 0) -> None:
        """Hold at least `num_blocks`, at most `limit` blocks, and residuals; what is stored stays."""
        if self._key.has_room(num_blocks, num_residuals) and self._value.has_room(num_blocks, num_residuals):
            return
        with self._lock:
            for part in (self._key, self._value):
                if not part.has_room(num_blocks, 0):
                    part.grow(max(num_blocks, min(limit, int(num_blocks * GROWTH))), 0)
                if not part.has_room(0, num_residuals):
                    part.grow(0, int(num_residuals * GROWTH))

    def write(self, key: Tensor | None, value: Tensor | None, step: Step) -> None:
        """Store the new tokens of a step, [num_tokens, num_kv_heads, dim]; the step says where. None: these stay."""
        with self._lock:
            write_step(key, value, self._key, self._value, step)

    def reopen(self, blocks: Tensor) -> None:
        """Read full blocks back into residuals, [n, 2] int64: (block, residual)."""
        with self._lock:
            for part in (self._key, self._value):
                part.reopen(blocks.to(self.key.device))

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Make the copies of a copy-on-write."""
        device = self.key.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        with self._lock:
            kernels.copy_blocks(self.key, self.value, sources, targets)
            for part in (self._key, self._value):
                part.copy_residuals([copy.residuals for copy in copies if copy.residuals])

    def fill(self, part: str, blocks: list[int], contents: Tensor) -> None:
        """Put `contents` (as `contents` gives them) into whole blocks of "key" or "value"."""
        with self._lock, torch.no_grad():
            stored = self._part(part).data
            stored[torch.tensor(blocks, device=stored.device)] = contents.to(stored.device)

    def poison(self, blocks: list[int]) -> None:
        """Fill free blocks with what is NaN in every format, as a number or as the scale of a code: all bits set."""
        self._set_bytes(blocks, POISON)

    def clear(self, blocks: list[int]) -> None:
        """Fill blocks with zeros."""
        self._set_bytes(blocks, 0)

    def not_poisoned(self, blocks: list[int]) -> list[int]:
        """Which of these blocks hold anything but poison."""
        with self._lock:
            held = [part.block_bytes_of(blocks).ne(POISON).any(1) for part in (self._key, self._value)]
        return [block for block, is_off in zip(blocks, (held[0] | held[1]).tolist(), strict=True) if is_off]

    def _set_bytes(self, blocks: list[int], byte: int) -> None:
        with self._lock:
            for part in (self._key, self._value):
                part.set_bytes(blocks, byte)

    def _part(self, name: str) -> PartStore:
        return self._key if name == "key" else self._value


class KVStorage:
    """The stores of all layers. A store belongs to a place in the layer groups; groups share it where their layers have
    equal shapes, dtypes, devices and KV formats. It is made when its first key arrives.
    """

    def __init__(self, block_size: int, kv_format: KVFormat, scales: Mapping[int, PartScales] | None = None) -> None:
        self._block_size = block_size
        self._format, self._scales = kv_format, scales or {}
        self._stores: dict[tuple[object, ...], LayerStore] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take now."""
        return sum(store.nbytes for store in list(self._stores.values()))

    @property
    def devices(self) -> set[torch.device]:
        """Those that blocks lie on."""
        return {store.key.device for store in list(self._stores.values())}

    @property
    def num_stores(self) -> int:
        return len(self._stores)

    @property
    def block_bytes(self) -> int:
        """Bytes that one more block takes in all stores that exist by now."""
        return sum(store.block_bytes for store in list(self._stores.values()))

    @property
    def block_bytes_by_device(self) -> Counter[torch.device]:
        """`block_bytes` of each device that blocks lie on."""
        sizes: Counter[torch.device] = Counter()
        for store in list(self._stores.values()):
            sizes[store.key.device] += store.block_bytes
        return sizes

    @property
    def residual_bytes(self) -> int:
        """Bytes that one more residual takes in all stores that exist by now."""
        return sum(store.residual_bytes for store in self._stores.values())

    @property
    def addresses(self) -> list[int]:
        """Where the blocks of all layers begin in memory. They move when a store grows."""
        return [store.contents(part).data_ptr() for store in list(self._stores.values()) for part in ("key", "value")]

    def store(self, place: int, key: Tensor, value: Tensor, layer: int) -> LayerStore:
        """The store for `layer`, at `place` of its group, whose first keys and values are these. Raises
        InvalidConfigError where the KV format cannot hold them.
        """
        own = self._format.of_layer(layer)
        scales = self._scales.get(layer, NO_SCALES)
        with self._lock:
            where = (place, signature(key, value), own, None if scales is NO_SCALES else layer)
            if where not in self._stores:
                check_dims(own, key.shape[3], value.shape[3])
                self._stores[where] = LayerStore(key, value, self._block_size, own, scales)
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
