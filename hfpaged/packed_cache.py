"""The cache of packed forwards: one row for the model, many sequences in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hfpaged import compat, patching
from hfpaged.cache_pool import PoolSpec, check_pageable, pool_for
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import group_layers
from hfpaged.layer_states import LayerStates
from hfpaged.packed_plan import PackedInput, PackedPlan
from hfpaged.packed_rows import PackedRows
from hfpaged.pageable import windows_of
from hfpaged.paged_layer import PagedLayer
from hfpaged.row_cache import RowCache, own_part
from hfpaged.sequence import Sequence
from hfpaged.step import Step


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
        owns = ((index, own_part(layer)) for index, layer in enumerate(self.layers))
        self._fresh = {index: own for index, own in owns if own is not None and compat.keeps_state(own)}
        pool.add_model(model, compat.model_name(compat.transformers_model(model)))
        patching.patch(model)

    @property
    def keeps_state(self) -> bool:
        """Whether layers keep more than keys and values, recurrent states say, which lie in no block."""
        return bool(self._fresh)

    @staticmethod
    def state_bytes(sequence: Sequence) -> Mapping[torch.device, int]:
        """What a sequence takes outside of the pool, by device."""
        return sequence.state.bytes_by_device if isinstance(sequence.state, LayerStates) else {}

    def begin(self, growth: Many[tuple[Sequence, int]]) -> None:
        """The next forward brings so many tokens for each sequence, side by side, those with one token first. Where
        the cache `keeps_state`, for one sequence.

        Raises OutOfBlocksError and changes nothing.
        """
        with self.pool.changing() as manager:
            layers = self._states_of(growth[0][0]).own() if self._fresh else {}
            self._rows.begin_packed(manager, growth)
        self._use(layers)

    def end(self) -> None:
        """The forward is over."""
        self._use(self._fresh)
        self._rows.end_packed()

    def undo(self, lengths: Many[int]) -> None:
        """The forward failed: the sequences of the step go back to so many tokens each, those with a state to none."""
        self._use(self._fresh)
        self.make_copies()  # a copied block must be whole in every layer, whatever the step did
        self._rows.undo_packed(lengths)

    def take_back(self, sequences: Many[Sequence], lengths: Many[int]) -> None:
        """Forwards that are over shall not have been: the sequences go back to so many tokens each, or to none where
        they cannot.
        """
        with self.pool.changing() as manager:
            for sequence, length in zip(sequences, lengths, strict=True):
                can = sequence.state is None and self.pool.residuals is None
                manager.trim(sequence, length if can else 0)

    def plan(self, given: PackedInput) -> PackedPlan:
        """The step under way, for processes that hold other heads of the model and `follow`."""
        return self._rows.plan_of_step(given)

    @contextmanager
    def following(self, plan: PackedPlan) -> Iterator[None]:
        """Around the one forward by which a step of another process is made here too."""
        self._rows.follow(plan)
        try:
            yield
        finally:
            self.make_copies()  # whatever the forward did, as `undo` does in the process that leads
            self._rows.end_followed()

    @property
    def steps(self) -> list[Step]:
        """Of the step under way, one for each layer group, on the host."""
        return self._rows.steps

    @property
    def length(self) -> int:
        """How many positions the model is told of in the step under way."""
        return self._rows.length

    def static(self, steps: list[Step], length: int) -> AbstractContextManager[None]:
        """Around one forward that reads these steps, whatever step is under way; see `PackedRows.static`."""
        return self._rows.static(steps, length)

    def make_copies(self) -> None:
        """Make the copies-on-write of the step under way in all layers that have not made them."""
        for index in list(self._rows.copies.unmade_in):
            self.layers[index].make_copies()

    def _states_of(self, sequence: Sequence) -> LayerStates:
        if sequence.state is None:
            sequence.state = LayerStates(copy.deepcopy(self._fresh))
        assert isinstance(sequence.state, LayerStates)
        return sequence.state

    def _use(self, layers: dict[int, Any]) -> None:
        """Let the model change these layers of transformers' own."""
        for index, own in layers.items():
            layer = self.layers[index]
            if isinstance(layer, PagedLayer):
                layer.own = own
            else:
                self.layers[index] = own
