"""Which sequence holds which block of a pool: a frozen picture of one moment, to print, to plot and to write down."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from hfpaged.memory_table import table_of

BlockState = Literal["used", "shared", "cached", "free", "unused"]


@dataclass(frozen=True)
class SequenceBlocks:
    """One sequence and its blocks. `kind` of who owns it: "cache", "request", "pinned" or "other".

    tokens   those that it has stored, with those whose blocks have left a window
    blocks   its block ids in each layer group, in their order
    is_own   whether it belongs to the cache or the batcher that was asked for the map
    """

    name: str
    kind: str
    tokens: int
    blocks: tuple[tuple[int, ...], ...]
    is_own: bool = False

    @property
    def num_blocks(self) -> int:
        """In all layer groups."""
        return sum(map(len, self.blocks))

    @property
    def all_blocks(self) -> list[int]:
        """Of all layer groups, one group after the other."""
        return [block for blocks in self.blocks for block in blocks]


@dataclass(frozen=True, repr=False)
class MemoryMap:
    """The blocks of one pool, and who held them when it was made. Numbers of blocks are those of `pool.stats()`.

    block_bytes   what a block takes in the layers of its group; 0 before the first key has come
    windows       of the layer groups, None for full attention
    refcounts     how many block tables hold each block, by block id, as far as blocks were ever handed out
    filled        tokens in each of these blocks, those of cached prefixes too
    cached        blocks that nobody holds and that keep a prefix until they are needed
    reserved      blocks whose memory something else takes
    sequences     all that hold blocks, those of whoever was asked first
    """

    block_size: int
    block_bytes: int
    num_blocks: int
    windows: tuple[int | None, ...]
    refcounts: tuple[int, ...]
    filled: tuple[int, ...]
    cached: frozenset[int]
    reserved: int
    sequences: tuple[SequenceBlocks, ...]

    @cached_property
    def num_used(self) -> int:
        """Blocks that at least one sequence holds."""
        return sum(count > 0 for count in self.refcounts)

    @cached_property
    def num_shared(self) -> int:
        """Blocks with two or more holders."""
        return sum(count > 1 for count in self.refcounts)

    @property
    def num_cached(self) -> int:
        """Blocks that count as free and keep a prefix."""
        return len(self.cached)

    @property
    def num_free(self) -> int:
        """Blocks that can be had, those that are cached among them."""
        return max(self.num_blocks - self.num_used - self.reserved, 0)

    @property
    def num_saved(self) -> int:
        """How many blocks more it would be if nobody shared any."""
        return sum(self.refcounts) - self.num_used

    def state(self, block: int) -> BlockState:
        """Of one block: "free" was handed out before, "unused" never was."""
        if not 0 <= block < len(self.refcounts):
            return "unused"
        count = self.refcounts[block]
        if count:
            return "shared" if count > 1 else "used"
        return "cached" if block in self.cached else "free"

    def shared_of(self, sequence: SequenceBlocks) -> int:
        """How many blocks of a sequence others hold too."""
        return sum(self.refcounts[block] > 1 for block in sequence.all_blocks)

    def holders(self, block: int) -> list[str]:
        """The names of the sequences that hold a block."""
        return [sequence.name for sequence in self.sequences for held in sequence.all_blocks if held == block]

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain lists, numbers and texts, as JSON takes them."""
        return {
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "blocks": {
                "total": self.num_blocks, "used": self.num_used, "shared": self.num_shared, "cached": self.num_cached,
                "free": self.num_free, "saved_by_sharing": self.num_saved, "reserved": self.reserved,
            },
            "windows": list(self.windows),
            "refcounts": list(self.refcounts),
            "filled": list(self.filled),
            "cached": sorted(self.cached),
            "sequences": [
                {
                    "name": each.name, "kind": each.kind, "own": each.is_own, "tokens": each.tokens,
                    "shared": self.shared_of(each), "blocks": [list(blocks) for blocks in each.blocks],
                }
                for each in self.sequences
            ],
        }  # fmt: skip

    def table(self, limit: int = 20) -> str:
        """What `str()` gives, with at most so many sequences by name."""
        return table_of(self, limit)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """A picture of the blocks, coloured by who holds them: written to `path` as PNG, or given back as a figure of
        matplotlib, which a notebook shows.

        Raises InvalidConfigError without matplotlib, and for a path that does not end with .png.
        """
        from hfpaged.memory_plot import draw

        return draw(self, path)

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows of a map; without matplotlib it shows the text."""
        from hfpaged.memory_plot import png
        from hfpaged.picture import can_plot

        return png(self) if can_plot() else None

    def __repr__(self) -> str:
        return (
            f"MemoryMap({self.num_used} of {self.num_blocks} blocks used, {self.num_shared} shared, "
            f"{self.num_cached} cached, {len(self.sequences)} sequences)"
        )

    def __str__(self) -> str:
        return self.table()
