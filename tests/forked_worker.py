"""Imports what takes long, and forks where a line of stdin asks for it: see forked.py. Nothing runs here before."""

import gc
import json
import os
import runpy
import signal
import sys
from contextlib import suppress

import hfpaged.engine.batcher
import hfpaged.serve.launch
import hfpaged.tensor_parallel  # noqa: F401  # what takes long is behind these

children: set[int] = set()


def main() -> None:
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        if "ended" in asked:
            answer = _code_of(asked["ended"])
        elif answer := os.fork():
            with suppress(PermissionError):  # the child was faster, and is at work
                os.setpgid(answer, answer)
            children.add(answer)
        else:
            return _become(**asked)
        print(json.dumps(answer), flush=True)
    for child in children:  # who asked is gone
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return None


def _code_of(child: int) -> int | None:
    """Exit code of a child, None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        return None
    children.remove(pid)
    return os.waitstatus_to_exitcode(status)


def _become(words: list[str], environment: dict[str, str], files: list[str], folder: str) -> None:
    """What `python *words` is."""
    os.setpgid(0, 0)
    os.chdir(folder)
    for number, name in enumerate([os.devnull, *files]):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


main()
