"""The Triton kernels under a whole model, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("triton_generate_worker.py")


def test_generate_gives_the_same_tokens_through_the_triton_kernels():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, WORKER], env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout.endswith("same tokens\n"), done.stdout + done.stderr[-3000:]
