"""Imports what takes long, and forks for each `python ...` that is asked for on its socket: see forked.py.

forked_server.py SOCKET        until its stdin ends
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress

import hfpaged.engine.batcher
import hfpaged.serve.launch
import hfpaged.tensor_parallel  # noqa: F401  # what takes long is behind these


def main(path: str) -> None:
    """Nothing is run here, so that no thread and no state but that of imports is there to be forked."""
    gc.collect()
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(100)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asking, _ = listening.accept()
        if not os.fork():
            listening.close()
            return _keep(asking)
        asking.close()
        _reap(os.WNOHANG)
    return _reap(0)


def _reap(how: int) -> None:
    """So that the time they took counts as ours."""
    try:
        while os.waitpid(-1, how)[0]:
            pass
    except ChildProcessError:
        return


def _keep(asking: socket.socket) -> None:
    """Starts what is asked for, tells its id, and then how it ended; kills it where nobody asks any more."""
    data, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
    child = os.fork()
    if not child:
        asking.close()
        return _become(files, **json.loads(data))
    for file in files:
        os.close(file)
    with suppress(PermissionError):  # the child was faster, and is at work
        os.setpgid(child, child)
    asking.send(str(child).encode())
    ended = os.pidfd_open(child)
    if ended not in select.select([asking, ended], [], [])[0]:
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(BrokenPipeError):  # who asked was killed
        asking.send(str(code).encode())
    os._exit(0)


def _become(files: list[int], words: list[str], environment: dict[str, str], folder: str) -> None:
    """What `python *words` is."""
    os.setpgid(0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], folder
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


main(sys.argv[1])
