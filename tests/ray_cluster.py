"""A Ray cluster of two machines on this one, and `hfpaged serve --replicas` on it: for tests. Nothing of it is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from filelock import FileLock
from waiting import wait_until

PATIENCE = 400.0  # seconds: five processes load torch, beside others that do the same on two cores
PAUSE = 0.3  # seconds between two questions to all that Ray Serve consists of
START_SECONDS = 90.0  # of a node of Ray's
STORE = 80 << 20  # bytes, the least that Ray takes
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0", "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # its own 0.1 take a fifth of a core
}  # fmt: skip


@dataclass
class Driver:
    """The process of `hfpaged serve`, and what it says."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        """Until its end; of two threads."""
        for line in self.process.stdout or ():
            self.lines.append(line)

    def has_said(self, pattern: str) -> re.Match[str] | None:
        return re.search(pattern, "".join(self.lines))

    def wait_for(self, pattern: str) -> re.Match[str]:
        """What it says, sooner or later."""
        with suppress(AssertionError):  # what it said instead tells more
            wait_until(lambda: self.has_said(pattern) or self.process.poll() is not None, PATIENCE, PAUSE)
        found = self.has_said(pattern)
        assert found is not None, "".join(self.lines)
        return found

    def stop(self) -> int:
        """By Ctrl-C; returns its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE)


@contextmanager
def driver(*words: str, script: str = "replicas_driver.py") -> Iterator[Driver]:
    """While inside it runs, in the end it is gone."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    environment = {**os.environ, **VARIABLES, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = Driver(process)
    reading = threading.Thread(target=found.read, daemon=True)
    reading.start()
    try:
        yield found
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        reading.join(PATIENCE)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Of all processes that test with Ray on this machine: two of them take longer than one after the other."""
    with FileLock(Path(tempfile.gettempdir()) / f"hfpaged-ray-{os.getuid()}.lock"):
        yield


@contextmanager
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths must not be long."""
    folder = tempfile.mkdtemp(prefix="hfr", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Ray's own Cluster: a head without CPUs, and two nodes with one each."""
    from ray.cluster_utils import Cluster

    with short_folder() as folder, patch.dict(os.environ, {**VARIABLES, "RAY_TMPDIR": folder}):
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        cluster = Cluster()
        try:
            with patient_start():
                for node in (head, *({"num_cpus": 1, "object_store_memory": STORE},) * 2):
                    _add_node(cluster, **node)
            yield cluster
        finally:
            cluster.shutdown()


def _add_node(cluster: Any, **node: Any) -> None:
    """A raylet ends where its agents, which are Python, take too long to start: then another one is started."""
    for tries in range(1, 4):
        try:
            cluster.add_node(**node)
            return
        except Exception:  # as Ray says that it took too long
            if tries == 3:
                raise


@contextmanager
def patient_start() -> Iterator[None]:
    """A node has 30 seconds to start, which no variable of Ray's changes."""
    from ray._private import services

    get_node = services.get_node

    def get_node_patiently(*args: Any) -> Any:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # it is not there yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    with patch.object(services, "get_node", get_node_patiently):
        yield


def free_port() -> int:
    """That nobody listens on just now."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_patiently(holds: Callable[[], object]) -> None:
    """Until `holds` says something true, which asks the cluster."""
    wait_until(holds, PATIENCE, PAUSE)


def replicas(client: httpx.Client) -> list[dict[str, Any]]:
    """As /v1/replicas tells of them."""
    response = client.get("/v1/replicas")
    assert response.status_code == 200, response.text
    rows: list[dict[str, Any]] = response.json()["data"]
    return rows
