"""A sequence: one row of tokens with its block tables, one per layer group."""

from __future__ import annotations

from hfpaged.block_table import BlockTable
from hfpaged.stream_rule import SinkTokens
from hfpaged.token_chain import TokenChain


class Sequence:
    """What the block manager hands out. All tables of a sequence have the same length.

    `chain` tells what its tokens are, None where that is not known: then nothing of it can be found by others.
    `sinks` are the first tokens of one that forgets those behind them.
    """

    __slots__ = ("chain", "sinks", "tables")

    def __init__(
        self, tables: tuple[BlockTable, ...], chain: TokenChain | None = None, sinks: SinkTokens | None = None
    ) -> None:
        self.tables, self.chain, self.sinks = tables, chain, sinks

    @property
    def length(self) -> int:
        """Stored tokens."""
        return self.tables[0].length
