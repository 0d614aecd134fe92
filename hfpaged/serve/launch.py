"""From a model to a server that runs."""

from __future__ import annotations

from typing import Any

import uvicorn

from hfpaged import demo_model
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.serve.app import build_app
from hfpaged.serve.options import ServeOptions


def run(
    model: Any = None, tokenizer: Any = None, *, host: str = "127.0.0.1", port: int = 8000,
    options: ServeOptions | None = None, **sizes: Any,
) -> int:  # fmt: skip
    """Serve a model object, or a name of one, until SIGTERM or Ctrl-C; `sizes` are arguments of ContinuousBatcher."""
    if model is None or isinstance(model, str):
        model, tokenizer = demo_model.load(model)
    with ContinuousBatcher(model, tokenizer, **sizes) as batcher:
        uvicorn.run(build_app(batcher, options), host=host, port=port)
    return 0
