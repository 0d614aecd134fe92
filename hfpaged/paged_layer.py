"""One layer of a PagedCache: it writes new keys and values into slots and hands out lazy views of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hfpaged.errors import CacheMismatchError
from hfpaged.handle import LazyKV
from hfpaged.kv_storage import LayerStore, check_signature
from hfpaged.layer_groups import LayerGroup, visible_offset
from hfpaged.layer_step import LayerStep, dense_rows, flat_tokens
from hfpaged.rows import Rows
from hfpaged.step import Step
from hfpaged.stored_steps import reading_step, rewriting_step


class PagedLayer(CacheLayerMixin):
    """The layer at `place` of layer group number `group_index`. Lengths live in the rows that all layers share."""

    is_croppable = True
    own: Any | None = None  # transformers' layer for what the model keeps here beside keys and values

    def __init__(self, rows: Rows, group_index: int, place: int) -> None:
        self.group: LayerGroup = rows.pool.groups[group_index]
        self._rows = rows
        self._group_index, self._place = group_index, place
        self._index = self.group.layers[place]
        self._store: LayerStore | None = None
        self.is_sliding = self.group.window is not None
        self.sliding_window = self.group.window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Find or make the store for keys and values of this kind."""
        store = self._rows.pool.storage.store(self._place, key_states, value_states, self._index)
        self._rows.pool.settle_size(self._index, store)
        self._store = store

    @property
    def is_initialized(self) -> bool:
        """Whether there are `keys`: mllama asks, before layers of a cache that was reset have any again."""
        return self._store is not None and self.get_seq_length() > 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [batch, num_kv_heads, length, dim]; returns lazy views of all visible ones.

        Keys that need gradients come back as plain tensors: a graph goes through this step, not through earlier ones.

        Raises CacheMismatchError, OutOfBlocksError.
        """
        if self._store is None:
            self.lazy_initialization(key_states, value_states)
        store = self._store
        assert store is not None
        check_signature(store, key_states, value_states, self._index)
        self._rows.join(self._index, key_states.shape[0], key_states.shape[2])
        self.make_copies()
        step = self._rows.steps[self._group_index].to(key_states.device)
        store.write(flat_tokens(key_states.detach()), flat_tokens(value_states.detach()), step)
        layer_step = LayerStep(self._rows, step, store, key_states, value_states, self.group.window, self._group_index)
        past_had_graph = self._index in self._rows.graphs
        if torch.is_grad_enabled() and (past_had_graph or key_states.requires_grad or value_states.requires_grad):
            self._rows.graphs.add(self._index)
            key, value = (layer_step.dense(is_key, past_had_graph) for is_key in (True, False))
            return key.contiguous(), value.contiguous()
        return self._lazy(layer_step, key_states, True), self._lazy(layer_step, value_states, False)

    def make_copies(self) -> None:
        """The copies-on-write of the step under way, and room for its new blocks."""
        if self._store is None:
            return
        pool, copies = self._rows.pool.blocks, self._rows.copies.of(self._group_index)
        residuals = self._rows.pool.residuals
        self._store.reserve(pool.high_water, pool.num_blocks, residuals.high_water if residuals else 0)
        if copies:
            self._store.copy_blocks(copies)
        self._rows.copies.made(self._index)

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible key length, offset of its first position), as transformers' dynamic layers say it."""
        length = self.get_seq_length()
        offset = visible_offset(length, self.group.window)
        return length + query_length - offset, offset

    @torch.compiler.disable
    def get_seq_length(self) -> int:
        """Positions seen, padding included and windows not subtracted."""
        return self._rows.length_of(self._index)

    def get_max_length(self) -> int:
        return -1 if self.group.window is None else self.group.window

    @property
    def record_past(self) -> bool:
        """Whether blocks that leave a window stay until the next crop: of all layers of the cache or of none."""
        return self._rows.records_past

    @record_past.setter
    def record_past(self, records: bool) -> None:
        self._rows.records_past = records

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next crop, which may then go back to before it."""
        self.record_past = True

    def share_store(self, other: PagedLayer) -> None:
        """Use the store that `other`, the same layer of a cache on the same pool, uses."""
        self._store = other._store

    @property
    def keys(self) -> Tensor | None:
        """The stored keys, gathered: [batch, num_kv_heads, visible length, dim]; None before the first ones."""
        return self._gathered("key")

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        """Overwrite the stored keys with others of the same shape. Raises CacheMismatchError."""
        self._overwrite(key=keys)

    @property
    def values(self) -> Tensor | None:
        """The stored values, gathered: [batch, num_kv_heads, visible length, dim]; None before the first ones."""
        return self._gathered("value")

    @values.setter
    def values(self, values: Tensor) -> None:
        """Overwrite the stored values with others of the same shape. Raises CacheMismatchError."""
        self._overwrite(value=values)

    # What transformers calls layer by layer concerns all rows at once; PagedCache does it once for all layers.
    def reset(self) -> None:
        raise NotImplementedError("reset the PagedCache, not one of its layers")

    def _gathered(self, which: str) -> Tensor | None:
        if self._store is None or self.get_seq_length() == 0:
            return None
        stored = getattr(self._store, which)
        step = reading_step(self._rows, self._group_index).to(stored.device)
        rows = self._rows
        return dense_rows(rows, step, stored, visible_offset(rows.length, self.group.window), rows.length)

    def _overwrite(self, *, key: Tensor | None = None, value: Tensor | None = None) -> None:
        new, old = (key, self.keys) if key is not None else (value, self.values)
        if new is None or old is None or new.shape != old.shape:
            raise CacheMismatchError(
                f"layer {self._index} holds keys or values of shape {_shape(old)} and was assigned {_shape(new)}; all "
                "layers share one length, so only the numbers can be changed: use crop() or another cache for the rest"
            )
        step = rewriting_step(self._rows, self._group_index, new.shape[2]).to(new.device)
        assert self._store is not None
        self._reopen(step)
        key, value = (None if part is None else flat_tokens(part.detach()) for part in (key, value))
        self._store.write(key, value, step)
        with self._rows.pool.changing():
            self._rows.residuals.settle()

    def _reopen(self, step: Step) -> None:
        """A residual is there for all layers or for none: what one of them is to write anew, all read back."""
        pool = self._rows.pool
        if step.filling is not None and pool.residuals is not None:
            for store in {store for layer in self.group.layers for store in pool.layer_stores.get(layer, ())}:
                store.reserve(pool.blocks.high_water, pool.num_blocks, pool.residuals.high_water)
                store.reopen(step.filling.reopened)

    def _lazy(self, layer_step: LayerStep, new: Tensor, is_key: bool) -> Tensor:
        shape = (new.shape[0], new.shape[1], layer_step.length - layer_step.offset, new.shape[3])
        lazy: LazyKV = LazyKV.wrap(shape, new.dtype, new.device)
        lazy.step, lazy.is_key = layer_step, is_key
        return lazy


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
