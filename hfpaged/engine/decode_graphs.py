"""Decode steps as recorded forwards: padded to the next size that was recorded, copied into its buffers and repeated.

What a recorded forward holds fast, and why a step is nevertheless computed as if it were its own:

    tokens, sequences            part of the key; a step is padded up to `size`
    width of the block tables    part of the key, for each layer group: the decode kernel takes the number of its
                                 splits and the stride of the tables from it
    length of the longest one    part of the key: how many positions the model is told of. Recorded with the longest
                                 that the key stands for, as whatever depends on it turns at some length (a mask that
                                 becomes narrower than the context), and is right for shorter ones too
    one query each, nothing new  all of these steps are decodes that are not first, and no other step comes here
    rows that read the same      told to no recorded forward: all read for themselves. Where reading once is worth more
    blocks                       than the launches, the step is not for a graph
    addresses of the blocks      all that the pool may ever hold is reserved before; looked at before each step
    addresses of weights, hooks, looked at when requests arrive (`check_model`): all graphs go when they change. Numbers
    adapters                     that are changed in place are read anew by each step
    autocast                     casts weights once and drops them when it ends: no step under it is for a graph
    model.training               a batcher has none such

A longest length that is held fast by mistake costs accuracy in silence, see transformers' pull request 48312.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfpaged import compat
from hfpaged.adapters import active_adapters, adapter_scales
from hfpaged.engine.cuda_capture import Capture
from hfpaged.fingerprint import hook_keys, weights_of
from hfpaged.packed_cache import PackedCache
from hfpaged.spread import input_device
from hfpaged.static_step import StaticInputs

logger = logging.getLogger("hfpaged")

# Tokens that the shortest tables and sequences of a graph have room for: fewer graphs, and no step is slower for it.
SHORTEST = 1024
# Bytes of common prefixes that a step need not read again, from which on it is no graph's: about ten milliseconds of
# reading, as much as the launches of a forward take. An estimate, not a measurement.
SHARED_BYTES = 32 * 2**30


class GraphKey(NamedTuple):
    """Steps that one graph can compute."""

    size: int  # sequences
    length: int  # tokens of the longest one, at most
    widths: tuple[int, ...]  # blocks in the tables of each layer group


class Graph(NamedTuple):
    inputs: StaticInputs
    replay: Callable[[], Tensor]  # gives logits [size, vocab]


class DecodeGraphs:
    """Graphs of `model`, recorded by `capture` at the first step of each kind. `sizes`: the numbers of sequences, with
    the largest first to be too small for nobody. `longest`: tokens that no sequence will exceed, where that is known.

    With `why_off` there are none.
    """

    def __init__(
        self, model: nn.Module, cache: PackedCache, capture: Capture, sizes: Many[int], *,
        longest: int | None = None, shortest: int = SHORTEST, why_off: str = "",
    ) -> None:  # fmt: skip
        self.why_off = why_off
        self.graphs: dict[GraphKey, Graph] = {}
        self._model, self._cache, self._capture = model, cache, capture
        self._device = input_device(compat.transformers_model(model))
        self._sizes, self._longest = sorted(sizes), longest
        self._shortest = max(shortest, cache.pool.block_size)
        self._addresses: list[int] = []
        self._looks: Any = None

    def logits(self, ids: Many[int], positions: Many[int]) -> Tensor | None:
        """Compute the step that the cache has begun, one token for each sequence: logits [num_seqs, vocab], or None
        where it is to be computed in another way, and nothing has been done.
        """
        if self.why_off or len(ids) > self._sizes[-1] or torch.is_autocast_enabled(self._device.type):
            return None
        if self._shares_much():
            return None
        graph = self._graph(self._key(len(ids)))
        if graph is None:
            return None
        self._cache.make_copies()
        graph.inputs.fill(ids, positions, self._cache.steps)
        return graph.replay()[: len(ids)].clone()  # the next step writes into the same place

    def capture_all(self) -> None:
        """Record the graphs of all sizes for sequences that are short yet, before the first step."""
        groups = self._cache.pool.groups
        width = self._bucket(1) // self._cache.pool.block_size
        for size in reversed(self._sizes):  # those that come later find room in what the largest one has needed
            if not self.why_off:
                self._graph(GraphKey(size, self._length(max(1, size)), (width,) * len(groups)))

    def check_model(self) -> None:
        """Weights may have moved and adapters changed since the last time: what was recorded of others goes."""
        if self.why_off:
            return
        looks = _looks(self._model)
        if looks != self._looks:
            self.graphs, self._looks = {}, looks
            if hook_keys(compat.transformers_model(self._model)):
                self._turn_off("hooks on its modules, which a recorded forward does not call")

    def describe(self) -> str:
        """For people."""
        if self.why_off:
            return f"off ({self.why_off})"
        return f"decode steps of {', '.join(map(str, self._sizes))} sequences, {len(self.graphs)} recorded"

    def _key(self, count: int) -> GraphKey:
        block_size = self._cache.pool.block_size
        widths = [self._bucket(step.block_tables.shape[1] * block_size) // block_size for step in self._cache.steps]
        size = next(size for size in self._sizes if size >= count)
        return GraphKey(size, self._length(max(self._cache.length, size)), tuple(widths))

    def _bucket(self, tokens: int) -> int:
        """The next power of two; all short ones are one."""
        return max(self._shortest, 1 << (tokens - 1).bit_length())

    def _length(self, tokens: int) -> int:
        bucket = self._bucket(tokens)
        return bucket if self._longest is None or self._longest < tokens else min(bucket, self._longest)

    def _shares_much(self) -> bool:
        """Whether common prefixes are so long that to read them once is better. With a window they are read by all."""
        pool = self._cache.pool
        spared = sum(
            (run.stop - run.start - 1) * run.blocks
            for group, step in zip(pool.groups, self._cache.steps, strict=True)
            if group.window is None
            for run in step.shared
        )
        return spared * pool.storage.block_bytes > SHARED_BYTES

    def _graph(self, key: GraphKey) -> Graph | None:
        """The graph of these steps, recorded if there is none yet; None where that fails, for good."""
        storage = self._cache.pool.storage
        if self._addresses != storage.addresses:
            self.graphs = {}
        if key not in self.graphs:
            try:
                self._cache.pool.reserve_all()
                self._addresses = storage.addresses
                self.graphs[key] = self._record(key)
            except Exception as error:  # a model may do what no graph can; others compute its steps
                self._turn_off(f"{type(error).__name__}: {error}")
        return self.graphs.get(key)

    def _record(self, key: GraphKey) -> Graph:
        """It is recorded with padding alone, so that nothing is stored and no sequence touched."""
        inputs = StaticInputs(key.size, key.widths, self._device)

        @torch.no_grad()
        def forward() -> Tensor:
            with self._cache.static(inputs.steps, key.length):
                out = self._model(
                    input_ids=inputs.ids, position_ids=inputs.positions, use_cache=True,
                    **{compat.cache_argument(): self._cache},
                )  # fmt: skip
            logits: Tensor = out.logits[0]
            return logits

        return Graph(inputs, self._capture(forward))

    def _turn_off(self, reason: str) -> None:
        self.why_off, self.graphs = reason, {}
        logger.warning(
            "%s: no graphs of decode steps, they are launched kernel by kernel: %s (said once)",
            type(compat.transformers_model(self._model)).__name__, reason,
        )  # fmt: skip


def _looks(model: nn.Module) -> tuple[Any, ...]:
    """What a graph of this model holds fast beside its step."""
    inner = compat.transformers_model(model)
    return (weights_of(inner).addresses, hook_keys(inner), active_adapters(inner), adapter_scales(inner))
