"""The kinds of `hfpaged bench` with their rows. Free of torch, so that help and errors are quick."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfpaged.bench.batch_rows import BATCH_ROWS
from hfpaged.bench.catalog import PREFIX_ROWS, ROWS, Row
from hfpaged.bench.quant_rows import QUANT_ROWS
from hfpaged.bench.serve_rows import SERVE_ROWS

ALL = "all"


@dataclass(frozen=True)
class Kind:
    """A subcommand; `line` says what it measures."""

    name: str
    line: str
    rows: tuple[Row, ...]

    @property
    def takes_server(self) -> bool:
        """Whether another server can have a part in it."""
        return any(row.takes_server or row.needs_server for row in self.rows)


def _all(kinds: tuple[Kind, ...]) -> Kind:
    """Every row of every kind: some names are those of two rows, so that the kind stands before."""
    rows = tuple(replace(row, name=f"{kind.name}.{row.name}") for kind in kinds for row in kind.rows)
    return Kind(ALL, "all of these one after the other, of a model that is loaded once", rows)


_SINGLE = (
    Kind("generate", "model.generate() with DynamicCache and with PagedCache, side by side in one process", ROWS),
    Kind("prefix", "prompts that begin alike, with and without sharing, side by side in one process", PREFIX_ROWS),
    Kind(
        "quant", "quantized PagedCaches, the native one and transformers' QuantizedCache, side by side in one process",
        QUANT_ROWS,
    ),
    Kind(
        "batch", "many requests at once: ContinuousBatcher and transformers, side by side in one process", BATCH_ROWS
    ),
    Kind("serve", "the server: over the batcher in process, and beside transformers serve or another one", SERVE_ROWS),
)  # fmt: skip
KINDS = (*_SINGLE, _all(_SINGLE))


def every_row() -> dict[str, Row]:
    """All rows by name, those of one kind by their short ones too. Two of one name have one direction."""
    return {row.name: row for kind in KINDS for row in kind.rows}
