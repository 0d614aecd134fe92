"""`--json FILE`: the figures of a command for other programs. "-" is stdout, where nothing else is written then."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hfpaged.errors import InvalidConfigError

STDOUT = "-"


def check_folder(flag: str, path: str | None) -> None:
    """Raises InvalidConfigError where a file cannot be written later, before anything is measured."""
    if path and path != STDOUT and not Path(path).resolve().parent.is_dir():
        raise InvalidConfigError(f"{flag} {path}: its folder does not exist; make it first")


def for_people(path: str | None) -> TextIO:
    """Where the table goes: stderr where stdout is for JSON."""
    return sys.stderr if path == STDOUT else sys.stdout


def write(path: str, record: Mapping[str, Any]) -> None:
    """Write `record`. Infinite numbers are no JSON: they must be None."""
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
