"""Processes that share one import of torch, transformers and hfpaged, which costs each one ten seconds of CPU else.

    process = forked.start(["-m", "hfpaged.serve", "./model"], environment, output=file)
    process.wait(30)
    subprocess.run([forked.python(), "-m", "hfpaged", "demo"])    # where another program starts it

For tests of what a program does, where starting it is no part of what is tested. What comes behind `python` in a
command line runs in a fork of a process in which nothing but imports has happened: with its own words, folder,
environment and files, from `__main__` to the end of the interpreter. But what is read while those are imported, as
OMP_NUM_THREADS is, has its value from the process that is forked. Each worker of pytest has one of these for each
PYTHONPATH.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from waiting import wait_until

TESTS = Path(__file__).parent
SERVER = TESTS / "forked_server.py"
HAS_FORKS = hasattr(os, "pidfd_open")  # else each process is one of its own
LOOK_SECONDS = 0.02
START_SECONDS = 240.0  # on a machine that has other things to do
READ_AT_IMPORT = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
# Of bash, curl and the like, which ask for a program by its path. Signals to it are signals to the fork.
PROGRAM = """#!{python} -IS
import json, os, select, signal, socket, sys

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
asked = {{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # until there is somebody to tell
socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
process = int(server.recv(99))
woken, wakes = socket.socketpair()  # by signals, also by those that come right before the waiting begins
wakes.setblocking(False)
signal.set_wakeup_fd(wakes.fileno())
for number in forwarded:
    signal.signal(number, lambda number, frame: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
while server not in select.select([server, woken], [], [])[0]:
    woken.recv(99)
code = int(server.recv(99))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def shared_environment() -> dict[str, str]:
    """For processes that import this tree's files, on one thread, and look for nothing on the net."""
    paths = [str(TESTS.parent), str(TESTS.parent / "kernels"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | READ_AT_IMPORT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@functools.cache
def _folder(path: str) -> Path:
    """Where the process that is forked listens, which finds modules on `path`; it is there until this one ends."""
    kept = tempfile.TemporaryDirectory(prefix="forked-")
    folder = Path(kept.name)
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, SERVER, folder / "asked"], stdin=subprocess.PIPE, stdout=log, stderr=log,
            env=shared_environment() | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for those who wait for it
        )  # fmt: skip
    atexit.register(_end, server, kept)
    wait_until(lambda: (folder / "asked").exists() or server.poll() is not None, START_SECONDS, LOOK_SECONDS)
    assert server.poll() is None, (folder / "log").read_text()
    program = folder / "python"
    program.write_text(PROGRAM.format(python=sys.executable, path=str(folder / "asked")))
    program.chmod(0o755)
    return folder


def _end(server: subprocess.Popen[bytes], kept: tempfile.TemporaryDirectory[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()  # it ends with this
    server.wait()
    kept.cleanup()


def python() -> str:
    """The path of a program that does what `sys.executable` does; that one where the system knows no such means."""
    return str(_folder(shared_environment()["PYTHONPATH"]) / "python") if HAS_FORKS else sys.executable


@dataclass
class Forked:
    """As subprocess.Popen, as far as it goes; the head of its process group. It ends with this object."""

    pid: int
    asked: socket.socket
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(BlockingIOError):
                self.returncode = int(self.asked.recv(99, socket.MSG_DONTWAIT) or -signal.SIGKILL)
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


Process = Forked | subprocess.Popen[bytes]


def start(words: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path | None = None) -> Process:
    """`words` are a script or "-m" and a module, and arguments. What it writes goes to the end of these files."""
    if not HAS_FORKS:
        return as_people_do(words, environment, output, errors)
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(str(_folder(environment.get("PYTHONPATH", "")) / "asked"))
    given = {"words": list(words), "environment": dict(environment), "folder": os.getcwd()}
    with open(os.devnull) as nothing, output.open("a") as out, (errors or output).open("a") as err:
        socket.send_fds(asked, [json.dumps(given).encode()], [nothing.fileno(), out.fileno(), err.fileno()])
        return Forked(int(asked.recv(99)), asked)


def as_people_do(
    words: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path | None = None
) -> subprocess.Popen[bytes]:
    """The same in a process of its own, which imports for itself."""
    with output.open("a") as out, (errors or output).open("a") as err:
        return subprocess.Popen(
            [sys.executable, *words], env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
