"""How a pool would lie in memory: the same layer groups, and so the same bytes of a block, that the real one has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolLayout:
    """`windows` by layer group, None for full attention; a block of any group takes `block_bytes`, scales included.
    Outside of blocks each sequence has `state_bytes`, `token_bytes` for each of its tokens (the keys of an indexer, and
    layers that hfpaged leaves to transformers), and with formats of four bits `residual_bytes`.
    """

    kv_format: str
    block_size: int
    windows: tuple[int | None, ...]
    block_bytes: int
    state_bytes: int = 0
    residual_bytes: int = 0
    token_bytes: int = 0

    def blocks(self, tokens: int) -> int:
        """The most blocks, in all groups, of one sequence that has grown to `tokens` stored tokens."""
        return sum(self._group_blocks(tokens, window) for window in self.windows)

    def passing_blocks(self, tokens: int, step: int) -> int:
        """Blocks beyond `blocks` that one such sequence needs while its prompt is computed, `step` tokens at once: what
        has left a window goes back after the step. A server refuses a request that has no room for them, see
        hfpaged.engine.block_needs.
        """
        held = (min(tokens, window + step + self.block_size) for window in self.windows if window is not None)
        most = sum(-(-length // self.block_size) for length in held)
        return most - sum(self._group_blocks(tokens, window) for window in self.windows if window is not None)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of one sequence, rounded up to blocks."""
        beside = self.state_bytes + self.residual_bytes + tokens * self.token_bytes
        return self.blocks(tokens) * self.block_bytes + beside

    def _group_blocks(self, tokens: int, window: int | None) -> int:
        """A window seldom begins where a block does, so it may reach into one block more than it fills."""
        whole = -(-tokens // self.block_size)
        return whole if window is None else min(whole, (window - 2) // self.block_size + 2)
