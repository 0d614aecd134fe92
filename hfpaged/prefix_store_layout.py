"""Between the rows in which the contents of a pool's blocks travel and the files of a prefix store."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import Tensor

from hfpaged.block_rows import BlockRows, RowPart
from hfpaged.prefix_manifest import kind_of
from hfpaged.prefix_store import StoredBlock
from hfpaged.prefix_store_block import BlockAddress, Layers, StoreFacts, specs_of
from hfpaged.prefix_store_writer import Copied


class StoreLayout:
    """How the rows of a pool and the files of a store go together. `parts` are in the order of the file; None where
    layers keep several kinds of keys, so that it is not known which block is of which.
    """

    def __init__(self, facts: StoreFacts, rows: BlockRows) -> None:
        self.rows = rows
        self._groups = [_file_order(facts, group, rows.parts(group)) for group in range(len(facts.groups))]

    def split(self, address: BlockAddress, group: int, row: Tensor) -> Copied | None:
        """A block to write, over the memory of `row`."""
        layout = self._groups[group]
        if layout is None:
            return None
        layers, parts = layout
        return Copied(address, group, layers, [row[part.start : part.stop] for part in parts])

    def join(self, group: int, block: StoredBlock, row: Tensor) -> bool:
        """Copy what was read into `row`; whether it is of this pool's kind."""
        layout = self._groups[group]
        if layout is None or layout[0] != block.layers:
            return False
        for part, contents in zip(layout[1], block.parts, strict=True):
            row[part.start : part.stop].copy_(contents)
        return True


def _file_order(facts: StoreFacts, group: int, parts: Many[RowPart]) -> tuple[Layers, list[RowPart]] | None:
    if any(part.kind for part in parts):
        return None
    layers = tuple(sorted({part.layer: kind_of(part.store) for part in parts}.items()))
    by_name = {f"layer.{part.layer}.{part.name}": part for part in parts}
    return layers, [by_name[spec.name] for spec in specs_of(facts, group, layers)]
