"""The examples run."""

import runpy
import sys
import warnings
from pathlib import Path

import pytest

from hfpaged.telemetry import instrumenting

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.demo_model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_prints_its_pool(path, demo, warm, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm)  # some start a server
    monkeypatch.chdir(tmp_path)  # some write a file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' new name of past_key_values
        runpy.run_path(str(path))
    if instrumenting.is_instrumented():  # a script ends with its process
        instrumenting.uninstrument()
    assert "blocks" in capsys.readouterr().out
