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

pytest.importorskip("triton")

HERE = Path(__file__).parent
SHARES = 2
WORKER_ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# By share: a worker of pytest-xdist takes neighbours, and another one need not do the same share again.
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


@functools.cache
def outcomes(table: str, share: int) -> dict[str, str]:
    """What the process found: the empty string, or a traceback, for each check of its share."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # these have a core each, and nobody else does the other share
        for other in range(SHARES):
            started(table, other)
    try:
        output, _ = started(table, share).communicate(timeout=550)
    except subprocess.TimeoutExpired:
        started(table, share).kill()
        return {}
    assert started(table, share).returncode == 0
    found: dict[str, str] = json.loads(output)
    return found


@pytest.mark.parametrize(("table", "share", "name"), CHECKS)
def test_triton_form_equals_plain_torch_in_the_interpreter(table: str, share: int, name: str) -> None:
    assert outcomes(table, share).get(name, "not done in time") == ""
