"""Servers of the same model to be compared, each a process of its own while it is measured, and how each is asked."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from hfpaged.bench.batch_continuous import PAGE
from hfpaged.bench.endpoint import Endpoint
from hfpaged.bench.setting import Setting

POOL = 32_768  # tokens, of both servers
START_SECONDS = 300.0
LAUNCH = "import sys; from transformers.cli.transformers import main; sys.exit(main())"

Ask = Callable[[str, int], dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """Where to POST completions; `ask(prompt, new)` is the body for `new` tokens, greedily and no matter which."""

    url: str
    ask: Ask
    headers: dict[str, str] = field(default_factory=dict)


def obstacle() -> str | None:
    """Why `transformers serve` cannot be started here, None where it can."""
    try:
        found = importlib.util.find_spec("transformers.cli.serving")
    except ModuleNotFoundError:
        found = None
    if found is None or not hasattr(transformers, "ContinuousBatchingConfig"):
        return f"transformers {transformers.__version__} has no serve --continuous-batching"
    from transformers.utils.import_utils import is_serve_available

    return None if is_serve_available() else 'pip install "transformers[serving]"'


@contextmanager
def ours(setting: Setting) -> Iterator[Target]:
    """hfpaged.serve."""
    port, name = _free_port(), _name(setting)
    sizes = [name, _dtype(setting), str(setting.device), str(port), str(POOL), *_trust(setting)]
    with _running([sys.executable, "-m", "hfpaged.bench.serve_ours", *sizes], port) as url:
        yield Target(f"{url}/v1/completions", openai_body(None))


@contextmanager
def transformers_serve(setting: Setting) -> Iterator[Target]:
    """`transformers serve --continuous-batching`."""
    port, name = _free_port(), _name(setting)
    options = {
        "host": "127.0.0.1", "port": port, "device": setting.device, "dtype": _dtype(setting),
        "cb-num-blocks": -(-POOL // PAGE),
    }  # fmt: skip
    flags = [*(f"--{key}={value}" for key, value in options.items()), *_trust(setting)]
    with _running([sys.executable, "-c", LAUNCH, "serve", name, "--continuous-batching", *flags], port) as url:
        yield Target(f"{url}/v1/completions", _transformers_body(name))


@contextmanager
def elsewhere(endpoint: Endpoint) -> Iterator[Target]:
    """A server that somebody else has started."""
    yield Target(endpoint.completions, openai_body(endpoint.model), endpoint.headers)


def openai_body(model: str | None) -> Ask:
    """As vLLM and others take it too."""
    options = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    named = {} if model is None else {"model": model}
    return lambda prompt, new: {**named, "prompt": prompt, "max_tokens": new, **options}


def _transformers_body(model: str) -> Ask:
    """It takes no ignore_eos, but a whole GenerationConfig; -1 is no token."""
    config = json.dumps({"do_sample": False, "eos_token_id": -1})
    return lambda prompt, new: {
        "model": model, "prompt": prompt, "max_tokens": new, "stream": True, "generation_config": config
    }  # fmt: skip


@contextmanager
def _running(command: list[str], port: int) -> Iterator[str]:
    """A process from when it answers to its end; its log is shown only where it does not start."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            if not _answers(f"http://127.0.0.1:{port}/health", process):
                log.seek(0)
                raise RuntimeError(f"{' '.join(command[:5])} did not start: {log.read()[-2000:].strip()}")
            yield f"http://127.0.0.1:{port}"
        finally:
            _stop(process)


def _answers(url: str, process: subprocess.Popen[Any]) -> bool:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


def _stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _name(setting: Setting) -> str:
    name: str = setting.model.config._name_or_path
    return name


def _trust(setting: Setting) -> list[str]:
    """Both call it so."""
    return ["--trust-remote-code"] if setting.trust_remote_code else []


def _dtype(setting: Setting) -> str:
    return str(setting.model.dtype).removeprefix("torch.")
