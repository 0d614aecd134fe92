"""What the server logs as JSON: every line of stderr, whoever wrote it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings

import pytest

from hfpaged.serve.logs import OTHERS, logging_to_stderr

SPEAKERS = """
import asyncio, logging, sys, warnings
import torch
from hfpaged.serve.logs import logging_to_stderr
from transformers.utils import logging as transformers_logging

async def forget():
    async def fail(): raise ValueError("forgotten")
    task = asyncio.ensure_future(fail())
    await asyncio.sleep(0)
    del task

with logging_to_stderr("info", as_json=True):
    transformers_logging.get_logger("transformers.modeling_utils").warning("of transformers\\nin two lines")
    logging.getLogger("torch.utils").warning("of torch")
    logging.getLogger("httpx").warning("of a library")
    logging.getLogger("uvicorn.error").error("of uvicorn")
    warnings.warn("of Python")
    asyncio.run(forget())
transformers_logging.get_logger("transformers.modeling_utils").warning("as ever")
"""


def test_each_line_of_stderr_is_an_object():
    done = subprocess.run([sys.executable, "-c", SPEAKERS], capture_output=True, text=True, timeout=200)
    *lines, last = done.stderr.splitlines()
    told = [json.loads(line) for line in lines]
    assert [line["logger"] for line in told] == [
        "transformers.modeling_utils", "torch.utils", "httpx", "uvicorn.error", "py.warnings", "asyncio",
    ]  # fmt: skip
    assert told[0]["message"] == "of transformers\nin two lines"
    assert "forgotten" in told[-1]["exception"]
    assert (last, done.returncode) == ("[transformers] as ever", 0)


def test_what_cannot_be_served_is_an_object_too():
    line = [sys.executable, "-m", "hfpaged", "serve", "./no-such-folder", "--port", "0", "--log-json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout) == (2, "")
    assert (told[-1]["level"], "there is no such folder" in told[-1]["message"]) == ("error", True)


@pytest.mark.parametrize("as_json", [True, False])
def test_loggers_are_as_they_were_afterwards(as_json):
    def state():
        found = [logging.getLogger(name) for name in (*OTHERS, "hfpaged", "uvicorn", "uvicorn.error")]
        return [(each.level, each.propagate, list(each.handlers)) for each in found], warnings.showwarning

    before = state()
    with logging_to_stderr("error", as_json=as_json):
        assert state() != before
    assert state() == before
