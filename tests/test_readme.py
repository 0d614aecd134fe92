"""The README is run: its test command by .ci/run, its Python here, in order and in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SKIP = "<!-- no-run -->"
BLOCK = re.compile(rf"(?P<skip>{SKIP}\s*)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
INSTALL_AND_TEST = re.compile(r"^.*pip install .*\[test\].*&& pytest.*$", re.MULTILINE)


def python_blocks():
    return [match["code"] for match in BLOCK.finditer(README) if not match["skip"]]


def test_the_test_command_of_the_readme_is_what_ci_runs():
    commands = [line.strip() for line in INSTALL_AND_TEST.findall(README)]
    assert len(commands) == 1, f"README.md should have one line that installs '.[test]' and runs pytest: {commands}"
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.demo_model
def test_the_python_of_the_readme_runs(demo, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme", "model": demo[0], "tokenizer": demo[1]}
    for number, code in enumerate(python_blocks(), start=1):
        exec(compile(code, f"README.md, python block {number}", "exec"), namespace)


def test_a_block_after_the_marker_is_skipped(monkeypatch):
    text = f"```python\none\n```\n\n{SKIP}\n```python\ntwo\n```\n\n```bash\nthree\n```\n"
    monkeypatch.setitem(python_blocks.__globals__, "README", text)
    assert python_blocks() == ["one\n"]
