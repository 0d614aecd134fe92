"""Threads: torch's number is kept and respected, callers do not disturb each other, forks survive."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from hfpaged_kernels import cpu_threads, numba_form, reference

cases = runpy.run_path(str(Path(__file__).parent / "cpu_cases.py"))
Paged, assert_equal_enough = cases["Paged"], cases["assert_equal_enough"]


def in_a_fresh_python(code: str, **environment: str) -> str:
    """What it prints, on two threads: a worker of pytest-xdist has one, which proves little here."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


ATTEND = """
import torch
from hfpaged_kernels import numba_form, reference
torch.manual_seed(0)
keys, values, query = torch.randn(40, 2, 16, 64), torch.randn(40, 2, 16, 64), torch.randn(1, 4, 64)
tables, lengths = torch.randperm(40)[None].int(), torch.tensor([640]).int()
arguments = query, keys, values, tables, lengths
def attend():
    torch.testing.assert_close(numba_form.decode(*arguments, scale=0.1), expected, atol=1e-5, rtol=1e-5)
"""
EXPECT = "expected = reference.decode(*arguments, scale=0.1)\n"


def test_the_number_of_threads_of_torch_is_respected_and_left_alone():
    out = in_a_fresh_python(
        ATTEND + "torch.set_num_threads(1)\n" + EXPECT + "attend()\nimport numba\n"
        "print(torch.get_num_threads(), numba.get_num_threads())\n"
    )
    assert out.split()[:2] == ["1", "1"]


def test_the_threading_layer_has_a_name():
    assert cpu_threads.threading_layer() in ("omp", "tbb", "workqueue")


@pytest.mark.parametrize("layer", ["", "workqueue"])
def test_two_python_threads_at_once_get_right_results(layer):
    code = (
        ATTEND + EXPECT + "import threading\nfailures = []\ndef many():\n    try:\n"
        "        for _ in range(200): attend()\n    except BaseException as error: failures.append(error)\n"
        "workers = [threading.Thread(target=many) for _ in range(2)]\n"
        "[worker.start() for worker in workers]\n[worker.join() for worker in workers]\n"
        "assert not failures, failures\nfrom hfpaged_kernels import cpu_threads\n"
        "print(cpu_threads.threading_layer())\n"
    )
    out = in_a_fresh_python(code, **({"NUMBA_THREADING_LAYER": layer} if layer else {}))
    assert layer in out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_attends_and_neither_dies_nor_hangs():
    code = ATTEND + EXPECT + (
        "attend()\nimport os, signal\nchild = os.fork()\nif child == 0:\n    signal.alarm(60)\n"
        "    for _ in range(5): attend()\n    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\nattend()\n"
    )  # fmt: skip
    in_a_fresh_python(code)


def test_importing_compiles_nothing():
    out = in_a_fresh_python(
        "from hfpaged_kernels import numba_form, cpu_decode, cpu_prefill\n"
        "print(len(cpu_decode.decode.signatures), len(cpu_prefill.prefill.signatures))"
    )
    assert out.split() == ["0", "0"]


def test_without_numba_plain_torch_does_it_and_says_so_once():
    out = in_a_fresh_python("""
        import importlib.util, logging, sys
        logging.basicConfig()
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "numba" else found(name, *rest)
        sys.modules["numba"] = None
        import torch
        from hfpaged_kernels import api
        keys = torch.zeros(2, 1, 16, 8)
        for _ in range(2):
            api.write_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), keys, keys.clone(), torch.tensor([3]))
        assert keys[0, 0, 3, 0] == 1
        print(api.backend(torch.device("cpu")))
    """)
    assert "torch" in out.splitlines()[0] + out.splitlines()[-1]
    assert out.count("numba is not installed") == 1


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_caller_in_another_thread_has_the_same_number_of_threads(two_threads):
    paged = Paged((600,), "gqa 64", 16, torch.float32)
    arguments = (paged.query(1), paged.keys, paged.values, paged.tables, paged.lengths)
    results = []
    worker = threading.Thread(target=lambda: results.append(numba_form.decode(*arguments, scale=0.1)))
    worker.start()
    worker.join()
    assert_equal_enough(results[0], reference.decode(*arguments, scale=0.1))


def test_a_first_compilation_is_told_of_once_and_what_was_kept_is_not(tmp_path, monkeypatch, caplog):
    (tmp_path / "kernel.py").write_text(
        "from numba import njit\n\n\n@njit(cache=True)\ndef kernel(threads):\n    return threads\n"
    )

    def run_anew():
        monkeypatch.setattr(cpu_threads, "_told", False)
        caplog.clear()
        kernel = runpy.run_path(str(tmp_path / "kernel.py"))["kernel"]
        cpu_threads.run(kernel)
        cpu_threads.run(kernel)
        return [record.getMessage() for record in caplog.records if record.name == "hfpaged.kernels"]

    (told,) = run_anew()
    assert told.startswith("compiling the kernels for this CPU: a minute or more, once; the result is kept in ")
    assert run_anew() == []


def test_where_nothing_can_be_kept_kernels_work_and_say_what_to_set():
    out = in_a_fresh_python("""
        from numba.core import caching
        caching.CacheImpl._locator_classes = []  # as on a file system that cannot be written
        import torch
        from hfpaged_kernels import numba_form
        cache, slots = torch.zeros(2, 1, 4, 8), torch.tensor([1])
        numba_form.write_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache.clone(), slots)
        print(cache.sum().item())
    """)
    assert out.startswith("8.0")
    assert out.count("set NUMBA_CACHE_DIR to a folder") == 1
