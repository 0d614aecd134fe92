"""The Python of tests that is started by a fork is, to those who start it, as any other one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


@pytest.fixture(params=["a fork", "sys.executable"])
def python(request):
    """The judge is the real one, and has the same to show."""
    return sys.executable if request.param == "sys.executable" else request.getfixturevalue("warm")


SAYS = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MINE'], input()); print('no', file=sys.stderr)"


def test_it_has_the_words_folder_environment_and_files_of_its_caller(python, tmp_path):
    (tmp_path / "says.py").write_text(SAYS + "; import beside; sys.exit(beside.CODE)")
    (tmp_path / "beside.py").write_text("CODE = 7")
    for words, name in ((["-c", SAYS], "-c"), (["says.py"], "says.py"), (["-m", "says"], str(tmp_path / "says.py"))):
        done = subprocess.run(
            [python, *words, "a b", "ü"], input="typed\n", cwd=tmp_path, env={"MINE": "x"}, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout == f"{[name, 'a b', 'ü']} {tmp_path} x typed\n"
        assert (done.stderr, done.returncode) == ("no\n", 0 if name == "-c" else 7)


def test_an_error_is_told_and_threads_and_what_is_left_to_the_end_still_run(python):
    code = (
        "import atexit, threading, time; atexit.register(print, 'last', flush=True)\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "raise ValueError('is told')"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "thread\nlast\n")
    assert done.stderr.endswith("ValueError: is told\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_it(python, number):
    # Short naps: a signal that comes right before a long wait begins is seen at its end only.
    code = (
        f"import signal, sys, time; signal.signal({number:d}, lambda *_: sys.exit(5)); print('on', flush=True)\n"
        "for _ in range(600): time.sleep(0.1)"
    )
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"on\n"
        process.send_signal(number)
        assert process.wait(60) == 5


def test_who_is_killed_is_gone_and_who_kills_itself_has_its_code(python):
    with subprocess.Popen([python, "-c", "print('on', flush=True); input()"], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"on\n"
        process.kill()
        assert process.stdout.read() == b""  # its end of the pipe is closed, so that it is gone
        assert process.wait(60) == -signal.SIGKILL
    done = subprocess.run([python, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"], timeout=60)
    assert done.returncode == -signal.SIGTERM
