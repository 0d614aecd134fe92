"""Metadata over what rows store already: to read all of it, or to write the end of it anew."""

from __future__ import annotations

from hfpaged.errors import CacheMismatchError
from hfpaged.rows import Rows
from hfpaged.step import Step, build_step


def reading_step(rows: Rows, group: int) -> Step:
    """Metadata to read all that is stored, with no new token. Raises StreamingError."""
    rows.check_whole(group)
    tables = [sequence.tables[group] for sequence in rows.sequences]
    step = build_step(tables, rows.pool.block_size, 0, None, [False] * len(tables))
    with rows.pool.changing():
        return rows.residuals.reading(step, tables)


def rewriting_step(rows: Rows, group: int, count: int) -> Step:
    """Metadata to write the last `count` positions anew. Raises CacheMismatchError where blocks are shared."""
    tables = [sequence.tables[group] for sequence in rows.sequences]
    held = [block for table in tables for block in table.blocks]
    with rows.pool.changing():
        if any(rows.pool.blocks.refcount(block) > 1 for block in held):
            raise CacheMismatchError(
                "other rows or caches share blocks with this one and would change with it; assign keys and values "
                "before rows are repeated and the cache is copied"
            )
        rows.pool.prefixes.withdraw(held)
        rows.tokens.forget(rows.sequences)
    kept = None if rows.kept is None else rows.kept[:, rows.length - count :]
    owns = [True] * len(tables)
    step = build_step(tables, rows.pool.block_size, count, kept, owns)
    with rows.pool.changing():
        return rows.residuals.with_filling(step, tables, kept, owns, one_layer=True)
