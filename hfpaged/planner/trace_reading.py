"""Read a trace: of `hfpaged serve --record`, of the public Mooncake format, or lines of the like. A line that cannot be
read is counted and passed by; a file without any request is an error.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from hfpaged.errors import HfpagedError
from hfpaged.planner.trace import FORMAT, VERSION, Runs, Skipped, Trace, TraceRequest, TraceStep
from hfpaged.planner.trace_line import EXPECTED, UnreadableLineError, number, request_of, step_of, whole
from hfpaged.planner.trace_tokens import head_of

MOONCAKE_CHUNK = 512  # tokens (Qin et al. 2024, arXiv 2407.00079)
_STDIN = "-"
_GZIP = b"\x1f\x8b"


class TraceError(HfpagedError, ValueError):
    """A file that is no trace, or none that can be opened."""


def read(path: str | Path) -> Trace:
    """The trace in a file, compressed by gzip or not; "-" is stdin. Raises TraceError."""
    try:
        with _opened(str(path)) as file:
            return read_lines(file, str(path))
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be read: {error.strerror or error}") from error


def read_steps(path: str | Path) -> list[TraceStep]:
    """The measured steps in a file, with or without requests. Raises TraceError."""
    reading = _Reading()
    try:
        with _opened(str(path)) as file:
            for index, line in enumerate(_whole_lines(file, reading.skipped), start=1):
                reading.take(index, line)
    except OSError as error:
        raise TraceError(f"the file {path} cannot be read: {error.strerror or error}") from error
    return reading.steps


def read_lines(lines: Iterator[bytes] | BinaryIO, name: str = "it") -> Trace:
    """The trace in these lines. Raises TraceError where none of them is a request."""
    reading = _Reading()
    for index, line in enumerate(_whole_lines(lines, reading.skipped), start=1):
        if line.strip():
            reading.take(index, line)
    if not reading.requests:
        raise TraceError(_nothing_in(name, reading.skipped))
    first = min(request.arrival for request in reading.requests)
    requests = [request._replace(arrival=request.arrival - first) for request in reading.requests]
    requests.sort(key=lambda request: request.arrival)
    return Trace(
        requests, reading.chunk or MOONCAKE_CHUNK, reading.skipped, reading.steps, reading.header, reading.runs
    )


@dataclass
class _Reading:
    """What was read so far. `started` are seconds that a recording began after the first one in the same file."""

    chunk: int = 0
    header: Mapping[str, Any] = field(default_factory=dict)
    started: float = 0.0
    requests: list[TraceRequest] = field(default_factory=list)
    steps: list[TraceStep] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    runs: dict[int, Runs] = field(default_factory=dict)
    refused: str = ""  # why lines are passed by, until the next header

    def take(self, index: int, text: bytes) -> None:
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise UnreadableLineError("it is no JSON object")
            self._take(line)
        except UnreadableLineError as error:
            self.skipped.add(index, str(error))
        except RecursionError:
            self.skipped.add(index, "it is no JSON: brackets within brackets without end")
        except ValueError as error:
            self.skipped.add(index, f"it is no JSON: {error}")

    def _take(self, line: Mapping[str, Any]) -> None:
        if "format" in line:
            self.refused = "it follows a header that cannot be read"
            self._begin(line)
            self.refused = ""
        elif self.refused:
            raise UnreadableLineError(self.refused)
        elif line.get("kind") == "step":
            self.steps.append(step_of(line))
        else:
            request = request_of(line, self.chunk or self._chunk_of(line))
            if request.hashes:
                self.chunk = self.chunk or MOONCAKE_CHUNK
            self.requests.append(request._replace(arrival=request.arrival + self.started))
            self._note_runs(request)

    def _note_runs(self, request: TraceRequest) -> None:
        """Of what its chunk is made that begins like another one, which stands before it in the file."""
        hashes = request.hashes + request.answer_hashes
        if request.like is not None and request.like[0] < len(hashes):
            place, other, common = request.like
            self.runs[hashes[place]] = (*head_of(self.runs, other, common), (hashes[place], self.chunk - common))

    def _begin(self, header: Mapping[str, Any]) -> None:
        """A recording begins: the first of the file, or one that was appended to it."""
        if header["format"] != FORMAT or header.get("version") != VERSION:
            raise UnreadableLineError(
                f"it is of format {header['format']!r}, version {header.get('version')!r}, and this reads "
                f"{FORMAT!r}, version {VERSION}; use the hfpaged that wrote it, or record it again"
            )
        chunk = whole("chunk", header.get("chunk"), 1, 1 << 20)
        if self.chunk and chunk != self.chunk:
            raise UnreadableLineError(
                f"a hash stands for {self.chunk} tokens before and for {chunk} behind it; split the file there"
            )
        started = number("started", header.get("started", 0.0))
        self.started = started - self.header.get("started", started)
        self.chunk, self.header = chunk, self.header or header

    def _chunk_of(self, line: Mapping[str, Any]) -> int:
        if "hashes" in line or "block_hashes" in line:
            raise UnreadableLineError('it has hashes, and no header before it says of how many tokens ("chunk")')
        return MOONCAKE_CHUNK


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    with nullcontext(sys.stdin.buffer) if path == _STDIN else open(path, "rb") as file:
        # Whatever its name is; a pipe cannot go back.
        is_compressed = cast(BufferedReader, file).peek(len(_GZIP)).startswith(_GZIP)
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_compressed else file


def _whole_lines(lines: Iterator[bytes] | BinaryIO, skipped: Skipped) -> Iterator[bytes]:
    """All lines; where a compressed file breaks off, those before."""
    index = 0
    try:
        for line in lines:
            index += 1
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        skipped.add(index + 1, f"the compressed file breaks off here: {error}")


def _nothing_in(name: str, skipped: Skipped) -> str:
    if not skipped.count:
        return f"the trace {name} is empty; expected is {EXPECTED}"
    reasons = "; ".join(f"line {line}: {reason}" for line, reason in skipped.first)
    return f"no line of the trace {name} can be read ({skipped.count} tried: {reasons}); expected is {EXPECTED}"
