"""A sequence: one row of tokens with its block tables, one per layer group."""

from __future__ import annotations

from hfpaged.block_table import BlockTable


class Sequence:
    """What the block manager hands out. All tables of a sequence have the same length."""

    __slots__ = ("tables",)

    def __init__(self, tables: tuple[BlockTable, ...]) -> None:
        self.tables = tables

    @property
    def length(self) -> int:
        """Stored tokens."""
        return self.tables[0].length
