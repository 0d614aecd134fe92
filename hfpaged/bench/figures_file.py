"""Reads what `hfpaged bench KIND --json FILE` wrote, this version or one before: those had neither runs nor a spread,
and did not say which way is better. Free of torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpaged.bench.catalog import Row
from hfpaged.bench.kinds import every_row
from hfpaged.bench.target import Target
from hfpaged.errors import InvalidConfigError

EXPECTED = "expected is what `hfpaged bench KIND --json FILE` writes: an object with a header and rows"


@dataclass(frozen=True)
class Figure:
    """One row as measured. `target` tells how values are counted; `is_more_better` is None where nothing says it."""

    name: str
    what: str
    shape: Any
    value: float | None
    values: tuple[float, ...]
    target: Target | None
    is_more_better: bool | None
    rival: str
    is_wrong: bool

    @property
    def low(self) -> float:
        """The least value of all turns; the value itself where it was run once. There must be one."""
        assert self.value is not None
        return min((self.value, *self.values))

    @property
    def high(self) -> float:
        """The greatest one."""
        assert self.value is not None
        return max((self.value, *self.values))

    @property
    def counts(self) -> Target:
        """How its values are counted and written."""
        return self.target or Target()


@dataclass(frozen=True)
class Figures:
    """A whole file; `source` is what people call it."""

    source: str
    header: Mapping[str, Any]
    rows: Mapping[str, Figure]

    @property
    def wrong(self) -> list[str]:
        """Rows whose tokens differed."""
        return [figure.name for figure in self.rows.values() if figure.is_wrong]


def read(path: str) -> Figures:
    """Raises InvalidConfigError for a file that is not there, damaged, or of something else."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # what is no UTF-8 is one, too
        raise InvalidConfigError(f"{path} is no JSON ({error}); {EXPECTED}") from error
    return from_record(path, record)


def from_record(source: str, record: Any) -> Figures:
    """What report.as_json made."""
    if not isinstance(record, dict):
        raise InvalidConfigError(f"{source} holds {type(record).__name__}, no object; {EXPECTED}")
    header, rows = record.get("header"), record.get("rows")
    if not isinstance(header, dict) or not isinstance(rows, list):
        found = ", ".join(map(str, record)) or "nothing"
        raise InvalidConfigError(f"{source} has {found}; {EXPECTED}")
    figures = [_figure(source, number, row) for number, row in enumerate(rows, 1)]
    return Figures(source, header, {figure.name: figure for figure in figures})


def _figure(source: str, number: int, row: Any) -> Figure:
    try:
        name = str(row["name"])
        target = None if row.get("target") is None else Target.parse(row["target"])
        return Figure(
            name=name,
            what=str(row.get("what", "")),
            shape=row.get("shape"),
            value=None if row["value"] is None else _number(row["value"]),
            values=tuple(map(_number, row.get("values") or ())),
            target=target,
            is_more_better=_direction(name, row.get("better"), target),
            rival=str(row.get("rival") or ""),
            is_wrong=row.get("same_tokens") is False,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidConfigError(f"{source}: row {number} cannot be read ({what}); {EXPECTED}") from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _direction(name: str, better: object, target: Target | None) -> bool | None:
    """What the row says, or its target does, or the row that has this name today."""
    if better in ("more", "less"):
        return better == "more"
    if target is not None:
        return target.least is not None
    known: Row | None = every_row().get(name)
    return None if known is None else known.is_more_better
