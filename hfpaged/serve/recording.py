"""`hfpaged serve --record FILE`: what was asked of a server and when, as a trace without any text (planner/trace.py).

A request is written when it ends. The engine's thread only hands it over; another thread hashes its tokens and writes
the line at once, so that a server that is killed has recorded all that ended before.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hfpaged.clock import now
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.engine.events import Aborted, Ended, Event, Failed, Finished, StepFinished
from hfpaged.engine.request import Request
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.trace import FORMAT, VERSION
from hfpaged.planner.trace_hashing import ChunkHasher

logger = logging.getLogger("hfpaged")

CHUNK = 16  # tokens of a hash, or the block size where that is smaller
# Steps that are written, for what a step costs: the first ones, and then one in so many seconds.
FIRST_STEPS, STEP_SECONDS = 200, 0.25
CLOSE_SECONDS = 10.0  # for what is not written yet
MOST_WAITING = 4096  # records that are not written yet: each keeps its request


class Recorder:
    """A hook that writes a trace. Raises InvalidConfigError where the file cannot be written, or holds something else:
    an older trace is appended to, anything else is left as it is.
    """

    def __init__(self, path: str, batcher: ContinuousBatcher) -> None:
        self.path, self._batcher = path, batcher
        self._chunk = min(CHUNK, batcher.pool.block_size)
        self._hasher = ChunkHasher(secrets.token_bytes(32), self._chunk)
        self._file = open_trace(path, self._chunk)
        self._started = now()
        self._numbers: dict[str, dict[str, int]] = {"tenant": {"": 0}, "adapter": {"": 0}}
        self._steps, self._next_step = 0, 0.0
        self._queue: queue.SimpleQueue[tuple[Ended, Request] | StepFinished | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="hfpaged-record", daemon=True)
        self._is_over = False

    def begin(self) -> None:
        """Write the header, and record from now on. Raises InvalidConfigError where the disk is full."""
        try:
            self._put(self._header())
        except OSError as error:
            os.close(self._file)
            raise InvalidConfigError(
                f"--record {self.path} cannot be written: {error.strerror or error}; name a file on another disk"
            ) from error
        self._writer.start()
        self._batcher.hooks.append(self)

    def __call__(self, event: Event) -> None:
        """In the engine's thread: nothing is done here but what takes no time."""
        if self._is_over:
            return
        if self._queue.qsize() >= MOST_WAITING:
            self._is_over = True
            logger.error("--record %s ends here: the disk is slower than what is to be written", self.path)
        elif isinstance(event, Ended):
            request = self._batcher.loop.requests.get(event.request_id)
            if request is not None:
                self._queue.put((event, request))
        elif isinstance(event, StepFinished) and event.num_tokens:
            self._steps += 1
            if self._steps <= FIRST_STEPS or event.time >= self._next_step:
                self._next_step = event.time + STEP_SECONDS
                self._queue.put(event)

    def close(self) -> None:
        """Record no more; all that has ended is written."""
        if self in self._batcher.hooks:
            self._batcher.hooks.remove(self)
        self._queue.put(None)
        self._writer.join(CLOSE_SECONDS)
        if self._writer.is_alive():  # whoever gets the number of a closed file next would get its lines
            self._is_over = True
            logger.error("--record %s ends here: the disk has not taken it for %g s", self.path, CLOSE_SECONDS)
        else:
            os.close(self._file)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if not self._is_over:
                try:
                    self._put(self._step(item) if isinstance(item, StepFinished) else self._request(*item))
                except OSError as error:
                    self._is_over = True
                    logger.error("--record %s ends here: %s", self.path, error.strerror or error)
                except Exception:
                    logger.exception("a request was not recorded")

    def _put(self, record: dict[str, Any]) -> None:
        """One line, with one call: it is there whole, or where the disk is full, not."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) < len(line):
            raise OSError("the disk is full")

    def _header(self) -> dict[str, Any]:
        batcher, told, spec = self._batcher, self._batcher.describe(), self._batcher._parts.spec
        groups = batcher.pool.groups
        return {
            "format": FORMAT, "version": VERSION, "chunk": self._chunk, "started": round(self._started, 6),
            "model": told["model"], "kv_format": batcher.pool.kv_format.title, "block_size": batcher.pool.block_size,
            "num_blocks": batcher.pool.num_blocks, "windows": [group.window for group in groups],
            "block_bytes": batcher.pool.storage.block_bytes,
            "token_bytes": batcher.pool.storage.block_bytes * len(groups) / batcher.pool.block_size,
            "prefix_sharing": told["prefix_sharing"], "max_num_seqs": told["max_num_seqs"],
            "max_num_batched_tokens": told["max_num_batched_tokens"], "watermark": spec.watermark,
            "by_priority": spec.policy == "priority", "max_step_stretch": spec.max_step_stretch,
            "max_num_queued_requests": spec.max_num_queued_requests,
        }  # fmt: skip

    def _request(self, event: Ended, request: Request) -> dict[str, Any]:
        metrics, (first, *others) = event.metrics, request.sequences
        found = self._hasher.hashes(_root_of(request), first.tokens)
        full = event.prompt_tokens // self._chunk
        record: dict[str, Any] = {
            "arrival": round(metrics.arrival_time - self._started, 6),
            "prompt_tokens": event.prompt_tokens,
            "output_tokens": round(event.output_tokens / len(request.sequences)),
            "hashes": found.hashes[:full],
            "answer_hashes": [] if others else found.hashes[full:],
            "like": found.like,
            "tenant": self._number("tenant", event.tenant),
            "adapter": self._number("adapter", request.adapter or ""),
            "n": len(request.sequences),
            "priority": request.priority,
            "hits": metrics.cached_tokens if metrics.admitted_time is not None else None,
            "finish": _reason(event),
            "ttft": _rounded(metrics.time_to_first_token),
            "duration": _rounded((metrics.finished_time or event.time) - metrics.arrival_time),
        }
        usual: dict[str, Any] = {
            "like": None, "tenant": 0, "adapter": 0, "n": 1, "priority": 0, "answer_hashes": [], "ttft": None,
        }  # fmt: skip
        return {name: value for name, value in record.items() if name not in usual or value != usual[name]}

    @staticmethod
    def _step(event: StepFinished) -> dict[str, Any]:
        return {
            "kind": "step", "prefill": event.num_prefill_tokens, "decodes": event.num_tokens - event.num_prefill_tokens,
            "context": event.context_tokens, "seconds": round(event.seconds, 6),
        }  # fmt: skip

    def _number(self, of: str, name: str) -> int:
        """A number for a name, in the order in which they come; names stay here."""
        numbers = self._numbers[of]
        return numbers.setdefault(name, len(numbers))


def open_trace(path: str, chunk: int | None) -> int:
    """To append to, for its owner alone; hashes in it are of `chunk` tokens. Raises InvalidConfigError."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidConfigError(
            f"--record {path} cannot be written: {error.strerror}; name a file in a folder that is there"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a device would get the mode of a trace, for everybody
            raise InvalidConfigError(f"--record {path} is no file that lines can be kept in; name another file")
        _check_end(file, path, chunk)
        _keep_private(file, path)
    except BaseException:
        os.close(file)
        raise
    return file


def _keep_private(file: int, path: str) -> None:
    try:
        os.fchmod(file, 0o600)
    except OSError as error:
        raise InvalidConfigError(
            f"--record {path} cannot be kept from others ({error.strerror}); name a file of this server's own user"
        ) from error


def _check_end(file: int, path: str, chunk: int | None) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidConfigError(f"--record {path} is being written by another server; name another file") from error
    size = os.fstat(file).st_size
    if not size:
        return
    try:
        header = json.loads(os.pread(file, 1 << 16, 0).split(b"\n")[0])
        is_trace = isinstance(header, dict) and header.get("format") == FORMAT and header.get("version") == VERSION
    except ValueError:
        is_trace = False
    if not is_trace or (chunk is not None and header.get("chunk") != chunk):
        of = f"a trace with hashes of {header.get('chunk')} tokens, not {chunk}" if is_trace else "no trace"
        raise InvalidConfigError(
            f"--record {path} is there already and is {of}; it is left as it is: name another file"
        )
    if os.pread(file, 1, size - 1) != b"\n":  # whoever wrote it was killed in the middle of a line
        os.write(file, b"\n")


def check_record(path: str) -> None:
    """Before a model is loaded: raises InvalidConfigError where nothing can be recorded into this file."""
    os.close(open_trace(path, None))


@contextmanager
def recording(path: str | None, batcher: ContinuousBatcher) -> Iterator[None]:
    """Record what `batcher` does meanwhile, if there is a path."""
    if path is None:
        yield
        return
    recorder = Recorder(path, batcher)
    recorder.begin()
    try:
        yield
    finally:
        recorder.close()


def _root_of(request: Request) -> bytes:
    """By what its prefixes are found: other models, adapters and salts have others."""
    if request.root is not None:
        return request.root.digest
    return json.dumps([request.tenant, request.salt, request.adapter]).encode()


def _reason(event: Ended) -> str:
    if isinstance(event, Finished):
        return event.finish_reason
    return "abort" if isinstance(event, Aborted) else "error" if isinstance(event, Failed) else "end"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
