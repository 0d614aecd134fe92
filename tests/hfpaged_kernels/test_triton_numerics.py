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
NAMES = [
    (table, name)
    for table in ("triton_cases", "triton_quantized_cases")
    for name in runpy.run_path(str(HERE / f"{table}.py"))["CHECKS"]
]


@functools.cache
def outcomes(table: str) -> dict[str, str]:
    """What the workers found: the empty string, or a traceback, for each check of a table."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "triton_interpreter_worker.py"), table]
    workers = [
        subprocess.Popen([*command, str(share), str(SHARES)], stdout=subprocess.PIPE, env=environment, text=True)
        for share in range(SHARES)
    ]
    found: dict[str, str] = {}
    for worker in workers:
        output, _ = worker.communicate(timeout=550)
        assert worker.returncode == 0
        found |= json.loads(output)
    return found


@pytest.mark.parametrize(("table", "name"), NAMES)
def test_triton_form_equals_plain_torch_in_the_interpreter(table: str, name: str) -> None:
    assert outcomes(table)[name] == ""
