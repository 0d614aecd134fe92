"""What the processes of a cluster print, which Ray prints here again with the name of each before it: for collectors
that read JSON, as one object a line.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import datetime, timezone
from typing import TextIO

# (ServeReplica:hfpaged:Replica pid=1234, ip=10.0.0.2) with colours about it.
_NAMED = re.compile(r"(?:\x1b\[\d+m)?\((?P<worker>[^()]*)\)(?:\x1b\[0m)? ?(?P<rest>.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[\d+m")


@contextmanager
def as_json_lines(*, wanted: bool) -> Iterator[None]:
    """Meanwhile all that is printed goes to stderr as JSON, where that is wanted."""
    if not wanted:
        yield
        return
    lines = JsonLines(sys.stderr)
    with redirect_stdout(lines), redirect_stderr(lines):
        yield


class JsonLines(io.TextIOBase):
    """Objects that come with the name of a worker get it as a field; lines that are no objects become some."""

    def __init__(self, target: TextIO) -> None:
        self._target, self._begun = target, ""

    def write(self, text: str) -> int:
        """See io.TextIOBase."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._target.write(_as_json(line) + "\n")
        self._target.flush()
        return len(text)


def _as_json(line: str) -> str:
    match = _NAMED.match(line)
    worker, rest = (match["worker"], match["rest"]) if match else (None, line)
    told = _object(rest) or {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), "level": "info", "logger": "ray",
        "message": _COLOUR.sub("", rest),
    }  # fmt: skip
    return json.dumps(told if worker is None else {**told, "worker": worker}, ensure_ascii=False)


def _object(text: str) -> dict[str, object] | None:
    try:
        found = json.loads(text) if text.startswith("{") else None
    except ValueError:  # a text that only begins like an object
        return None
    return found if isinstance(found, dict) else None
