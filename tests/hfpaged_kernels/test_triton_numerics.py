"""The Triton kernels in Triton's interpreter, on any machine, against plain torch."""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("triton")

HERE = Path(__file__).parent
SHARES = 2
WORKER_ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# By share: a worker of pytest-xdist takes neighbours, while another one is at another share.
CHECKS = [
    (table, share, name)
    for table in ("triton_cases", "triton_quantized_cases")
    for share in range(SHARES)
    for name in list(runpy.run_path(str(HERE / f"{table}.py"))["CHECKS"])[share::SHARES]
]


@functools.cache
def started(table: str, share: int) -> subprocess.Popen[str]:
    """A process that works on a share of a table."""
    command = [sys.executable, str(HERE / "triton_interpreter_worker.py"), table, str(share), str(SHARES)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | WORKER_ENVIRONMENT, text=True)


def outcomes(folder: Path, table: str, share: int) -> dict[str, str]:
    """What the process found: the empty string, or a traceback, for each check of its share. All workers of pytest ask
    the same `folder`, so that each share is done once.
    """
    found = folder / f"{table}-{share}.json"
    with FileLock(f"{found}.lock"):
        if not found.exists():
            found.write_text(_done(table, share))
    told: dict[str, str] = json.loads(found.read_text())
    return told


def _done(table: str, share: int) -> str:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # these have a core each
        for other in range(SHARES):
            started(table, other)
    try:
        output, _ = started(table, share).communicate(timeout=550)
    except subprocess.TimeoutExpired:
        started(table, share).kill()
        return "{}"
    assert started(table, share).returncode == 0
    return output


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.mark.parametrize(("table", "share", "name"), CHECKS)
def test_triton_form_equals_plain_torch_in_the_interpreter(folder: Path, table: str, share: int, name: str) -> None:
    assert outcomes(folder, table, share).get(name, "not done in time") == ""
