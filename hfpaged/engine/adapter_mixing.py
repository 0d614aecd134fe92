"""Tokens of several adapters in one forward: what S-LoRA (Sheng et al. 2023) and Punica (Chen et al. 2023) do with
kernels of their own is done here by PEFT's own layers, each of which is told which tokens it is asked about.

    one row      | a a a a | - - | b b b |        runs: tokens of one adapter, side by side
    LoRA         base layer once over all of it, then for `a` and `b` what PEFT makes of their tokens and of the base
                 layer's result for them
    other kinds  the layer once for each run of tokens, as they change what goes into the base layer, or are one
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfpaged.adapter_choice import BASE, Layer
from hfpaged.errors import MixedForwardError


class Run(NamedTuple):
    """Tokens side by side that are for one adapter: `count` of them from `start` on. None: what is active by itself."""

    adapter: str | None
    start: int
    count: int  # type: ignore[assignment]


class Row:
    """The tokens of a forward, in runs.

    runs     of all tokens
    kept     of those whose logits are wanted: what comes to the head
    """

    def __init__(self, counts: Many[tuple[str | None, int]], kept: Many[tuple[str | None, int]]) -> None:
        """(adapter, tokens) of each sequence in the row, in their order."""
        self.runs, self.kept = _runs(counts), _runs(kept)
        self.num_tokens, self.num_kept = (sum(run.count for run in runs) for runs in (self.runs, self.kept))


class MixedLayers:
    """Layers that take tokens of several adapters at once, while `over` a row of them; `head` is the one that may be
    given only the tokens whose logits are wanted.
    """

    def __init__(self, layers: Many[Layer], head: Any) -> None:
        self._layers = [_MixedLayer(layer, is_head=layer.module is head) for layer in layers]

    @contextmanager
    def over(self, row: Row) -> Iterator[None]:
        """One forward inside, over just these tokens. It raises MixedForwardError where a layer is not given them."""
        try:
            for layer in self._layers:
                layer.begin(row)
            yield
        finally:
            for layer in self._layers:
                layer.end()


class _MixedLayer:
    """In the place of a layer's own forward, for a while."""

    def __init__(self, layer: Layer, is_head: bool) -> None:
        self._layer, self._module, self._is_head = layer, layer.module, is_head
        self._is_lora = hasattr(layer.module, "lora_A") and hasattr(layer.module, "base_layer")
        self._row: Row | None = None

    def begin(self, row: Row) -> None:
        self._row, self._own_state = row, self._layer.state
        self._replaced = self._module.__dict__.get("forward")  # accelerate's
        self._forward = self._module.forward
        self._module.__dict__["forward"] = self

    def end(self) -> None:
        """Also of one that has not begun."""
        if self._row is not None:
            _put_back(self._module, self._replaced)
            self._layer.restore(self._own_state)
            self._row = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            raise self._error("is given more than hidden states")
        dim, runs = self._tokens_of(x)
        try:
            return self._beside_base(x, dim, runs) if self._is_lora else self._one_by_one(x, dim, runs)
        finally:
            self._layer.restore(self._own_state)

    def _tokens_of(self, x: Tensor) -> tuple[int, list[Run]]:
        """(the dimension in which the tokens lie, their runs)"""
        assert self._row is not None
        dim = 1 if x.shape[0] == 1 and x.ndim > 1 else 0
        count = x.shape[dim]
        if count == self._row.num_tokens:
            return dim, self._row.runs
        if self._is_head and count == self._row.num_kept:
            return dim, self._row.kept
        raise self._error(f"is given {count} of {self._row.num_tokens} tokens")

    def _beside_base(self, x: Tensor, dim: int, runs: list[Run]) -> Tensor:
        base = self._module.base_layer
        if base._forward_hooks or base._forward_pre_hooks:
            raise self._error("has a base layer with hooks, which would be called for parts of the tokens")
        result: Tensor = base(x)
        for run in runs:
            if self._acts(run.adapter):
                part = result.narrow(dim, run.start, run.count)
                with _giving(base, part):
                    part.copy_(self._run(x, dim, run))
        return result

    def _one_by_one(self, x: Tensor, dim: int, runs: list[Run]) -> Tensor:
        if not any(self._acts(run.adapter) for run in runs):
            self._choose(BASE)
            return self._forward(x)
        return torch.cat([self._run(x, dim, run) for run in runs], dim)

    def _run(self, x: Tensor, dim: int, run: Run) -> Tensor:
        self._choose(run.adapter)
        return self._forward(x.narrow(dim, run.start, run.count))

    def _choose(self, adapter: str | None) -> None:
        if adapter is None:
            self._layer.restore(self._own_state)
        else:
            self._layer.choose(adapter)

    def _acts(self, adapter: str | None) -> bool:
        """Whether an adapter changes anything in this layer."""
        if adapter is not None:
            return adapter in self._layer.names
        active, is_disabled = self._own_state
        return not is_disabled and any(name in self._layer.names for name in _listed(active))

    def _error(self, what: str) -> MixedForwardError:
        return MixedForwardError(f"a {type(self._module).__name__} {what}")


@contextmanager
def _giving(module: Any, result: Tensor) -> Iterator[None]:
    """Inside `module` has computed already."""
    replaced = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *args, **kwargs: result
    try:
        yield
    finally:
        _put_back(module, replaced)


def _put_back(module: Any, forward: Any) -> None:
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def _listed(active: str | list[str]) -> list[str]:
    return [active] if isinstance(active, str) else active


def _runs(counts: Many[tuple[str | None, int]]) -> list[Run]:
    runs: list[Run] = []
    start = 0
    for adapter, count in counts:
        if runs and runs[-1].adapter == adapter:
            runs[-1] = runs[-1]._replace(count=runs[-1].count + count)
        elif count:
            runs.append(Run(adapter, start, count))
        start += count
    return runs
