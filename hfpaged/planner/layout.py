"""How a pool would lie in memory: the same layer groups, and so the same bytes of a block, that the real one has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolLayout:
    """`windows` by layer group, None for full attention; a block of any group takes `block_bytes`, scales included.
    `state_bytes` are kept for each sequence outside of blocks, and `residual_bytes` besides by formats of four bits.
    """

    kv_format: str
    block_size: int
    windows: tuple[int | None, ...]
    block_bytes: int
    state_bytes: int = 0
    residual_bytes: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks of one sequence of `tokens` stored tokens, in all groups."""
        return sum(-(-min(tokens, window or tokens) // self.block_size) for window in self.windows)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of one sequence, rounded up to blocks."""
        return self.blocks(tokens) * self.block_bytes + self.state_bytes + self.residual_bytes
