"""Layers that hold keys and values and something beside them: the former in blocks, the rest as transformers has it."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hfpaged.paged_layer import PagedLayer
from hfpaged.rows import Rows


class PagedStateLayer(PagedLayer):
    """`own` is transformers' layer for this place, in which keys and values are never filled: it keeps the rest."""

    own: Any

    def __init__(self, rows: Rows, group_index: int, place: int, own: Any) -> None:
        super().__init__(rows, group_index, place)
        self.own = own
        self.supports_early_init = own.supports_early_init

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return bool(self.own.is_croppable)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        if hasattr(self.own, "activate_past_recording"):
            self.own.activate_past_recording()

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # not there yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self.own, name)


class PagedIndexedLayer(PagedStateLayer):
    """With the keys of an indexer, which picks what a query sees (sparse attention of DeepSeek V3.2)."""

    @property
    def indexer_position_ids(self) -> Any:
        return self.own.indexer_position_ids

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Any) -> None:
        self.own.indexer_position_ids = positions


class PagedHybridLayer(PagedStateLayer):
    """With the convolution and recurrent states of a layer that has attention and a state space model side by side."""


LinearAttentionCacheLayerMixin.register(PagedHybridLayer)


def paged_layer(rows: Rows, group_index: int, place: int, own: Any) -> PagedLayer:
    """The paged layer to put in the place of `own`, transformers' layer; `own` is kept where it holds more than keys
    and values.
    """
    if isinstance(own, LinearAttentionCacheLayerMixin):
        return PagedHybridLayer(rows, group_index, place, own)
    if hasattr(own, "update_indexer"):
        return PagedIndexedLayer(rows, group_index, place, own)
    return PagedLayer(rows, group_index, place)
