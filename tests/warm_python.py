"""A Python that has imported torch, transformers and hfpaged before it is started, by a fork: 10 s of CPU less each.

For tests of what a program does, where starting it is no part of what is tested. It takes words, folder, environment,
files and signals, and ends, as `sys.executable` does; but what is read while those are imported (PYTHONPATH,
OMP_NUM_THREADS, HF_HUB_OFFLINE) is that of `warm_python` itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from product import environment
from served import wait_until

SERVER = Path(__file__).with_name("warm_python_server.py")
MODULES = ("hfpaged.engine.batcher", "hfpaged.serve.launch", "transformers.models.llama.modeling_llama")
PATIENCE = 240.0  # seconds; a machine may be busy
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
asked = {{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # until there is somebody to tell
socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
process = int(server.recv(99))
for number in forwarded:
    signal.signal(number, lambda number, frame: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
code = int(server.recv(99))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def warm_python(folder: Path, *modules: str) -> Iterator[str]:
    """The path of a program that does what `sys.executable` does, while inside; `modules` are imported besides. Where
    the system has no such means it is `sys.executable`.
    """
    if not hasattr(os, "pidfd_open"):
        yield sys.executable
        return
    path, log = folder / "asked", folder / "log"
    command = [sys.executable, SERVER, path, *MODULES, *modules]
    with log.open("w") as out, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment({}), start_new_session=True
    ) as server:  # fmt: skip
        wait_until(lambda: path.exists() or server.poll() is not None, PATIENCE)
        assert server.poll() is None, log.read_text()
        program = folder / "python"
        program.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
        program.chmod(0o755)
        yield str(program)
