"""What the tiers below a pool have done, counted for those who report it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class SwapCounts:
    """Blocks are those of layer groups, bytes those that were copied, seconds those that it took.

    `blocks_out` went to a tier when they were evicted, `blocks_kept` were evicted and lay there still. `blocks_in`
    came back, and with them `tokens_in` of prompts, which need not be computed. `blocks_dropped` were lost: the tier
    was full, or its lower one took them. Of `declined` lookups nothing was brought back, as computing was cheaper;
    `short` found no room for it.
    """

    blocks_out: int = 0
    blocks_kept: int = 0
    blocks_in: int = 0
    blocks_dropped: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    tokens_in: int = 0
    declined: int = 0
    short: int = 0

    def add(self, other: SwapCounts) -> None:
        """Count what `other` has counted, too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
