"""A memory map as a text for people."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from hfpaged.config import format_bytes

if TYPE_CHECKING:
    from hfpaged.memory_map import MemoryMap, SequenceBlocks

HEAD = ("sequence", "blocks", "shared", "tokens", "bytes")


def table_of(memory: MemoryMap, limit: int) -> str:
    """A summary, then the sequences: at most `limit` of them by name, those with the most blocks, the rest summed."""
    lines = [_summary(memory)]
    if memory.sequences:
        lines += [_sharing(memory), "", *_aligned([HEAD, *_rows(memory, limit)])]
    if any(each.is_own for each in memory.sequences) and not all(each.is_own for each in memory.sequences):
        lines += ["", "* of the one that was asked for the map"]
    return "\n".join(lines)


def _summary(memory: MemoryMap) -> str:
    parts = [
        f"{memory.num_used} of {memory.num_blocks} blocks used ({memory.num_shared} shared)",
        f"{memory.num_free} free ({memory.num_cached} of them cached)",
        f"{memory.block_size} tokens a block",
    ]
    if memory.block_bytes:
        parts.append(f"{format_bytes(memory.block_bytes)} each")
    if len(memory.windows) > 1:
        kinds = ("full" if window is None else f"window {window}" for window in memory.windows)
        parts.append(f"{len(memory.windows)} layer groups ({', '.join(kinds)})")
    return ", ".join(parts)


def _sharing(memory: MemoryMap) -> str:
    count, held = len(memory.sequences), sum(memory.refcounts)
    text = f"{count} {'sequence holds' if count == 1 else 'sequences hold'} {held} blocks"
    if not memory.num_saved:
        return text
    return f"{text} in {memory.num_used}: sharing saves {format_bytes(memory.num_saved * memory.block_bytes)}"


def _rows(memory: MemoryMap, limit: int) -> list[tuple[str, ...]]:
    """Those with names in the order of the map, as if it were cut."""
    largest = sorted(memory.sequences, key=lambda each: -each.num_blocks)[:limit]
    named = {id(each) for each in largest}
    marks = not all(each.is_own for each in memory.sequences)
    rows = [
        _row(memory, f"{each.name}{' *' if each.is_own and marks else ''}", [each])
        for each in memory.sequences
        if id(each) in named
    ]
    rest = [each for each in memory.sequences if id(each) not in named]
    return rows + ([_row(memory, f"{len(rest)} more", rest)] if rest else [])


def _row(memory: MemoryMap, name: str, sequences: Many[SequenceBlocks]) -> tuple[str, ...]:
    """What several hold together, each for itself."""
    blocks = sum(each.num_blocks for each in sequences)
    shared, tokens = sum(map(memory.shared_of, sequences)), sum(each.tokens for each in sequences)
    return name, str(blocks), str(shared), str(tokens), format_bytes(blocks * memory.block_bytes)


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
