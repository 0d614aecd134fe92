"""A sequence: one row of tokens with its block tables, one per layer group."""

from __future__ import annotations

from typing import Protocol

from hfpaged.block_table import BlockTable
from hfpaged.stream_rule import SinkTokens
from hfpaged.token_chain import TokenChain


class State(Protocol):
    """What layers keep of a sequence that lies in no block."""

    def fork(self) -> State:
        """The same for another sequence, which goes on apart."""

    def drop(self) -> None:
        """The sequence is gone, or begins anew."""


class Sequence:
    """What the block manager hands out. All tables of a sequence have the same length.

    `chain` tells what its tokens are, None where that is not known: then nothing of it can be found by others.
    `sinks` are the first tokens of one that forgets those behind them. `state` is of all its tokens: it cannot go back
    to fewer, but for none.
    """

    __slots__ = ("chain", "sinks", "state", "tables")

    def __init__(
        self, tables: tuple[BlockTable, ...], chain: TokenChain | None = None, sinks: SinkTokens | None = None
    ) -> None:
        self.tables, self.chain, self.sinks = tables, chain, sinks
        self.state: State | None = None

    @property
    def length(self) -> int:
        """Stored tokens."""
        return self.tables[0].length
