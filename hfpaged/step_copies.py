"""Copies-on-write of a step: every layer makes them before it writes, and until then nobody else may fill a source."""

from __future__ import annotations

from hfpaged.block_manager import BlockManager
from hfpaged.block_table import BlockCopy
from hfpaged.kv_pool import KVPool
from hfpaged.sequence import Sequence


class StepCopies:
    """The copies of the step under way, and the layers that have yet to make them."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.by_group: list[list[BlockCopy]] = []  # to be made before the step's first write
        self.unmade_in: set[int] = set()  # layers that have not made them yet
        self._sources: Sequence | None = None  # holds the blocks that are copied from

    def begin(self, manager: BlockManager, by_group: list[list[BlockCopy]]) -> None:
        """A step needs these. Another thread must not get a block while layers of ours have yet to copy it."""
        self.by_group = by_group
        if any(by_group):
            self._sources = manager.hold(by_group)
            self.unmade_in = {layer for group in self._pool.groups for layer in group.layers}

    def follow(self, by_group: list[list[BlockCopy]]) -> None:
        """A step of another process needs these: it is he who holds their sources."""
        self.by_group = by_group
        self.unmade_in = {layer for group in self._pool.groups for layer in group.layers} if any(by_group) else set()

    def of(self, group: int) -> list[BlockCopy]:
        """What each layer of this group has to copy."""
        return self.by_group[group] if self.by_group else []

    def made(self, layer: int) -> None:
        """`layer` has made its part of the copies; after the last one their sources are let go."""
        if self.unmade_in:
            self.unmade_in.discard(layer)
            if not self.unmade_in:
                self.let_go()

    def let_go(self) -> None:
        """The step is over, or its copies are made: the sources may be used again."""
        sources, self._sources = self._sources, None
        self.unmade_in = set()
        if sources is not None:
            with self._pool.changing() as manager:
                manager.free(sources)

    def free(self, manager: BlockManager) -> None:
        """The rows are given back, and with them what was to be copied for them."""
        if self._sources is not None:
            manager.free(self._sources)
        self.by_group, self.unmade_in, self._sources = [], set(), None
