"""Commands of clients that want gigabytes of their own: named by a variable, found in PATH, or installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path
from typing import NamedTuple

CONSTRAINTS = Path(__file__).with_name("constraints.txt")


class Tool(NamedTuple):
    """`variable` of the environment may name the command; `first` is installed before `packages`, so that the build of
    torch is the one that pip is configured for, and `held` packages are kept at the versions of our own tests.
    """

    command: str
    variable: str
    packages: tuple[str, ...]
    held: tuple[str, ...] = ()


def find(tool: Tool, folder: Path) -> str:
    """The command's path. Its environment is made in `folder` where there is none yet, which takes minutes."""
    if found := os.environ.get(tool.variable) or shutil.which(tool.command):
        return found
    place, is_whole = folder / tool.command, folder / f"{tool.command}.whole"
    command = place / "bin" / tool.command
    if not is_whole.exists():
        venv.create(place, clear=True, with_pip=True)
        held = folder / f"{tool.command}.txt"
        lines = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] in tool.held]
        held.write_text("\n".join(lines) + "\n")
        for names in (tool.held, tool.packages):
            if names:
                subprocess.run([place / "bin" / "pip", "install", "-q", "-c", held, *names], check=True)
        assert command.exists(), f"{tool.packages} bring no {tool.command}"
        is_whole.touch()
    return str(command)


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it in `folder`, with what it says when it fails; it must not find hfpaged's own packages."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    done = subprocess.run(command, cwd=folder, env=clean | env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done
