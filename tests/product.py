"""`hfpaged serve` as people start it: a process of its own, with the demo model, for clients that nobody here wrote."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hfpaged_kernels
import httpx
from metrics_figures import Figures
from served import wait_until

import hfpaged

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}
PATIENCE = 300.0  # seconds; a machine may be busy, and whoever waits in vain waits once
FLAGS = ("--port", "0", "--metrics-compat", "vllm", "--kv-cache-memory", "256MiB", "--max-model-len", "2048")
_PLACES = [str(Path(package.__file__ or "").parent.parent) for package in (hfpaged, hfpaged_kernels)]
_READY = re.compile(r"^ready: (http://\S+)/v1 ", re.MULTILINE)


@dataclass(frozen=True)
class Product:
    """`url` is without /v1; `key` is Ann's."""

    url: str
    model: str
    key: str = KEYS["ann"]

    @property
    def api(self) -> str:
        return self.url + "/v1"

    def get(self, path: str) -> httpx.Response:
        response = httpx.get(self.url + path, headers={"Authorization": f"Bearer {self.key}"}, timeout=PATIENCE)
        return response.raise_for_status()

    def figures(self) -> Figures:
        return Figures(self.get("/metrics").text)

    def running(self) -> float:
        """Requests that run or wait."""
        figures = self.figures()
        return figures("hfpaged_requests_running") + figures("hfpaged_requests_waiting")

    def received(self) -> float:
        return self.figures()("hfpaged_requests_received_total")


@contextmanager
def product(folder: Path) -> Iterator[Product]:
    """One server while inside, with two keys; `folder` keeps what it wrote. When it is left no request is there, the
    accounts agree, no block is held, and it stops with 0.
    """
    told, log = folder / "stdout", folder / "stderr"
    command = [sys.executable, "-m", "hfpaged.serve", *FLAGS, "--api-key", f"bob={KEYS['bob']}"]
    with told.open("w") as out, log.open("w") as err, subprocess.Popen(
        command, stdout=out, stderr=err, env=environment({"HFPAGED_API_KEY": f"ann={KEYS['ann']}"})
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: _READY.search(told.read_text()) or process.poll() is not None, PATIENCE)
            ready = _READY.search(told.read_text())
            assert ready is not None, log.read_text()
            yield (found := Product(ready[1], _model_of(ready[1])))
            assert_whole(found)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, log.read_text()
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """For a process that imports hfpaged as this one has it, and looks for nothing on the net."""
    ours = {"PYTHONPATH": os.pathsep.join(_PLACES), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **ours, **more}


def _model_of(url: str) -> str:
    """The name that /v1/models tells."""
    (model,) = Product(url, "").get("/v1/models").json()["data"]
    return str(model["id"])


def assert_whole(found: Product) -> None:
    """Of all requests that came, each has ended in one way, and nobody holds a block."""
    wait_until(lambda: found.running() == 0, PATIENCE)
    figures = found.figures()
    finished, aborted = (figures(f"hfpaged_requests_{how}_total") for how in ("finished", "aborted"))
    rejected = sum(figures.by("hfpaged_requests_rejected_total", "reason").values())
    assert figures("hfpaged_requests_received_total") == finished + aborted + rejected
    stats = found.get("/v1/kv/stats").json()
    assert stats["pool"]["blocks"]["used"] == 0
    assert stats["requests"]["running"] == stats["requests"]["waiting"] == 0
