"""An OpenAI-compatible endpoint around the model object that you have.

    hfpaged.serve.run(model, tokenizer=tokenizer)   # or a name; `hfpaged serve MODEL` on the command line
    app = hfpaged.serve.build_app(batcher)          # an ASGI application, for a stack of your own

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpaged.serve.app import build_app
    from hfpaged.serve.launch import run
    from hfpaged.serve.options import ServeOptions

_HOME_OF = {
    "ServeOptions": "hfpaged.serve.options",
    "build_app": "hfpaged.serve.app",
    "run": "hfpaged.serve.launch",
}

__all__ = ["ServeOptions", "build_app", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = attribute
    return attribute
