"""The plain count: what other ways of counting a pool are held against."""

from __future__ import annotations


def tokens_by_group(manager):
    """Tokens that lie in blocks of each layer group, those of shared blocks once, counted one by one."""
    filled = [{} for _ in manager.copy_tables()]
    for sequence in manager.sequences:
        for table, blocks in zip(sequence.tables, filled, strict=True):
            for index, block in enumerate(table.blocks, table.first):
                tokens = min(table.length - index * manager.block_size, manager.block_size)
                blocks[block] = max(blocks.get(block, 0), tokens)
    return [sum(blocks.values()) for blocks in filled]
