"""Processes that share one import of torch, transformers and hfpaged, which costs each one ten seconds of CPU else.

    process = forked.start(["-m", "hfpaged.serve", "./model"], environment, output=file)
    process.wait(30)

What comes behind `python` in a command line runs in a fork of a process in which nothing but imports has happened: with
its own arguments, environment, files and session, from `__main__` to the end of the interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("forked_worker.py")
LOOK_SECONDS = 0.02


class Parent:
    """The process that is forked, and which of its children have ended. It ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock, self._said = threading.Lock(), tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, text=True, start_new_session=True,  # Ctrl-C is for those who wait for it
        )  # fmt: skip

    def ask(self, **asked: Any) -> Any:
        """Its answer to one question."""
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            self._said.seek(0)
            raise AssertionError(self._said.read().decode(errors="replace"))
        return json.loads(answer)


_parents: dict[str, Parent] = {}


def parent_of(environment: Mapping[str, str]) -> Parent:
    """One for each path on which modules are found, since it has imported them."""
    path = environment.get("PYTHONPATH", "")
    if path not in _parents:
        _parents[path] = Parent(environment)
    return _parents[path]


@dataclass
class Forked:
    """As subprocess.Popen, as far as it goes."""

    pid: int
    parent: Parent
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.parent.ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(LOOK_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(words: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path | None = None) -> Forked:
    """`words` are a script or "-m" and a module, and arguments. What it writes goes to the end of these files."""
    parent = parent_of(environment)
    files = [output, errors or output]
    for file in files:
        file.touch()  # for those who read it before the fork has come so far
    names = [str(file.absolute()) for file in files]
    pid = parent.ask(words=list(words), environment=dict(environment), files=names, folder=os.getcwd())
    return Forked(pid, parent)
