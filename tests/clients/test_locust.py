"""locust, without its page: people who chat for some seconds, and none finds a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from product import KEYS

pytestmark = [
    pytest.mark.demo_model, pytest.mark.skipif(find_spec("locust") is None, reason="needs locust: pip install locust"),
]  # fmt: skip
LOCUSTFILE = Path(__file__).with_name("chat_locustfile.py")
SECONDS = 4


def test_people_chat_at_once_and_no_answer_fails(product):
    before = product.received()
    command = [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", product.url, "--headless", "--users", "6",
        "--spawn-rate", "6", "--run-time", f"{SECONDS}s", "--stop-timeout", "300", "--json", "--only-summary",
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"SERVED_MODEL": product.model, "SERVED_KEYS": ",".join(KEYS.values())}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    by_name = {row["name"]: row for row in json.loads(done.stdout)}
    assert {row["num_failures"] for row in by_name.values()} == {0}
    assert set(by_name) == {"/v1/chat/completions", "to the last token", "/v1/models", "/ready"}
    assert by_name["/v1/chat/completions"]["num_requests"] == product.received() - before >= 2
