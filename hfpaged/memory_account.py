"""What the blocks of one request take, and for how long."""

from __future__ import annotations

from collections.abc import Iterable

from hfpaged.block_pool import BlockPool
from hfpaged.clock import now
from hfpaged.sequence import Sequence


class MemoryAccount:
    """Looked at whenever blocks have come or are about to go; between two looks it bears what it has at the second.
    That is exact for one that grows block by block and is looked at when a block is full.

    peak_blocks     the most blocks at once, each counted once
    shared_blocks   the most of them at once that others hold too
    block_seconds   blocks integrated over time; of one with several holders each bears an equal part
    """

    __slots__ = ("_since", "block_seconds", "peak_blocks", "shared_blocks")

    def __init__(self) -> None:
        self.peak_blocks = self.shared_blocks = 0
        self.block_seconds = 0.0
        self._since: float | None = None

    def look(self, pool: BlockPool, sequences: Iterable[Sequence]) -> None:
        """`sequences` are those that the request has now."""
        time = now()
        holdings = [table.blocks for sequence in sequences for table in sequence.tables]
        count, shared, part = pool.holding(holdings)
        if count > self.peak_blocks:
            self.peak_blocks = count
        if shared > self.shared_blocks:
            self.shared_blocks = shared
        if self._since is not None:
            self.block_seconds += part * (time - self._since)
        self._since = time
