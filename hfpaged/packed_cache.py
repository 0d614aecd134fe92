"""The cache of packed forwards: one row for the model, many sequences in it."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import nn

from hfpaged import compat, patching
from hfpaged.cache_pool import PoolSpec, check_pageable, pool_for
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import group_layers
from hfpaged.packed_rows import PackedRows
from hfpaged.pageable import windows_of
from hfpaged.row_cache import RowCache
from hfpaged.sequence import Sequence


class PackedCache(RowCache):
    """What an engine gives to the model: `begin` a step, one forward over input_ids [1, tokens] with position_ids,
    then `end` or `undo`. The model must be patched.

    Raises as `PagedCache` does, for the same models and sizes.
    """

    _rows: PackedRows

    def __init__(self, model: nn.Module, pool: KVPool | None, spec: PoolSpec) -> None:
        config = compat.transformers_model(model).config
        check_pageable(model, config)
        layers = compat.default_layers(config)
        pool = pool_for(model, config, group_layers(windows_of(config, layers)), pool, spec)
        self._adopt(PackedRows(pool), layers)
        with pool.changing():
            pool.models.add(model)
        patching.patch(model)

    @property
    def keeps_state(self) -> bool:
        """Whether layers keep more than keys and values, recurrent states say, which lie in no block."""
        return any(map(compat.keeps_state, self._own_layers))

    def begin(self, growth: Many[tuple[Sequence, int]]) -> None:
        """The next forward brings so many tokens for each sequence, side by side, those with one token first.

        Raises OutOfBlocksError and changes nothing.
        """
        with self.pool.changing() as manager:
            self._rows.begin_packed(manager, growth)

    def end(self) -> None:
        """The forward is over."""
        self._rows.end_packed()

    def undo(self, lengths: Many[int]) -> None:
        """The forward failed: the sequences of the step go back to so many tokens each."""
        for index in list(self._rows.copies.unmade_in):
            self.layers[index].make_copies()  # a copied block must be whole in every layer, whatever the step did
        self._rows.undo_packed(lengths)
