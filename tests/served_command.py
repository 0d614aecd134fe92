"""`hfpaged serve` as a process, with a tiny model: for tests."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import forked
from waiting import wait_until

START_SECONDS = 300.0  # on a machine that has other things to do

Start = Callable[[Sequence[str], Mapping[str, str], Path, Path], forked.Process]


@dataclass
class Command:
    """`hfpaged serve` in a process of its own; what it writes is in files."""

    process: forked.Process
    output: Path
    errors: Path

    @property
    def address(self) -> re.Match[str] | None:
        return re.search(r"ready: (http://[\w.:]+)", self.output.read_text() + self.errors.read_text())

    @property
    def url(self) -> str:
        assert self.address, self.errors.read_text()
        return self.address[1]


@contextmanager
def command(folder: Path, *flags: str, start: Start = forked.start) -> Iterator[Command]:
    """While inside it serves; `start` makes the process of what comes behind `python`."""
    words = ["-m", "hfpaged.serve", str(folder), "--port", "0", "--kv_cache_memory", "4MiB", *flags]
    environment = forked.shared_environment() | {"HFPAGED_API_KEY": ""}
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("output", "errors")]
        process = start(words, environment, *files)
        found = Command(process, *files)
        try:
            wait_until(lambda: process.poll() is not None or found.address, START_SECONDS, 0.02)
            assert found.address, found.errors.read_text()
            yield found
        finally:
            process.kill()
            process.wait()
