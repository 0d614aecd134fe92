"""From a model to a server that runs."""

from __future__ import annotations

import logging
import os
import socket
from functools import partial
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from hfpaged import demo_model
from hfpaged.conditions import without_bars
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.kv_events.publishing import check_events
from hfpaged.serve import start_report
from hfpaged.serve.adapters import load_adapters
from hfpaged.serve.app import build_app
from hfpaged.serve.follower import follow, follows, quiet_logging
from hfpaged.serve.listening import listening_on
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.serve.options import ServeOptions
from hfpaged.serve.recording import check_record
from hfpaged.serve.start_figures import figures
from hfpaged.serve.telling import progress, tell_ready, url_of, warn_if_open
from hfpaged.serve.uvicorn_server import Config, Server
from hfpaged.telemetry import providers
from hfpaged.telemetry.span_attributes import CAPTURE_CONTENT

logger = logging.getLogger("hfpaged")


def run(
    model: Any = None, tokenizer: Any = None, *, host: str = "127.0.0.1", port: int = 8000,
    options: ServeOptions | None = None, dtype: str = "auto", device: str | None = None, log_level: str = "info",
    log_json: bool = False, split: bool = False, trust_remote_code: bool = False, **sizes: Any,
) -> int:  # fmt: skip
    """Serve a model object, or one of a name or folder, until SIGTERM or Ctrl-C; returns 0.

    Of a model that several processes compute together each calls it: rank 0 serves, the others compute along. It
    returns 1 where one of them is lost.

    Args:
        model, tokenizer: as ContinuousBatcher takes them, or a name or folder alone; None: the demo model.
        host, port: where to listen; port 0 takes a free one.
        options: of the server.
        dtype, device: of a model that is loaded here; "auto": the checkpoint's, None: cuda where there is one.
        log_level, log_json: what goes to stderr meanwhile, and as what.
        split: load one of a name over all processes that torchrun has started; `device` is not looked at then.
        trust_remote_code: whether code is run that one of a name brings in files of its own.
        sizes: arguments of ContinuousBatcher.

    Raises InvalidConfigError for an address that cannot be had, and what loading and ContinuousBatcher raise.
    """
    options = options or ServeOptions()
    if options.record_prompts:
        os.environ[CAPTURE_CONTENT] = "true"
    if follows(model, split):
        with quiet_logging(log_level, as_json=log_json), without_bars():  # rank 0 shows them
            model, tokenizer = loaded(model, tokenizer, dtype, device, split, trust_remote_code)
            with ContinuousBatcher(model, tokenizer, **sizes) as batcher:
                return follow(batcher)
    if options.record is not None:
        check_record(options.record)
    if options.kv_events is not None:
        check_events(options.kv_events)
    console = Console(highlight=False)
    with logging_to_stderr(log_level, as_json=log_json), providers.observed(), listening_on(host, port) as listening:
        with progress("loading the model", console, log_json), without_bars(wanted=log_json):
            model, tokenizer = loaded(model, tokenizer, dtype, device, split, trust_remote_code)
            model = load_adapters(model, options.adapters)
        with progress("measuring what a step takes, and making the pool", console, log_json):
            batcher = ContinuousBatcher(model, tokenizer, **sizes)
        with batcher:
            _serve(batcher, options, listening, console, log_json)
    return 0 if batcher.fault is None else 1


def _serve(
    batcher: ContinuousBatcher, options: ServeOptions, listening: socket.socket, console: Console, log_json: bool
) -> None:
    host, port = listening.getsockname()[:2]
    url = url_of(host, port)
    told = figures(batcher, options, url)
    if log_json:
        start_report.log(told)
    else:
        start_report.show(told, console)
    warn_if_open(options, host, url)
    if options.kv_events is not None and options.api_keys and not options.kv_events.salted:
        logger.warning(
            "prompts of API keys are no KV events, and without a key nobody is let in: routers are told of nothing; "
            "--kv-events-salted tells them, token ids in clear"
        )
    app = build_app(batcher, options)
    config = Config(app, app.state.service, log_config=None)
    server = Server(config, app.state.service, partial(tell_ready, url, console, log_json))
    batcher.when_lost(server.stop_for)
    server.run(sockets=[listening])
    if batcher.fault is None:
        logger.info("stopped: no request is left, and all that was recorded is delivered")


def loaded(
    model: Any, tokenizer: Any, dtype: str, device: str | None, split: bool, trust_remote_code: bool
) -> tuple[PreTrainedModel, Any]:
    """What was given, or what its name stands for. Raises as load_model()."""
    if isinstance(model, torch.nn.Module):
        return model, tokenizer
    return load_model(model, dtype, device, split, trust_remote_code)


def load_model(
    name: Any, dtype: str, device: str | None, split: bool = False, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer by a name or folder, None for the demo model; `device` None: cuda where there is one.
    `split` over all ranks, it lies where transformers puts the part of each.

    Raises DemoModelError, or CheckpointError.
    """
    device = None if split else device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name is None:  # whose makers' dtype is not that of the file that it ships in
        return demo_model.load(None, "float32" if dtype == "auto" else dtype, device)
    return demo_model.load(name, dtype, device, trust_remote_code=trust_remote_code)
