"""An OpenAI-compatible endpoint around the model object that you have.

    hfpaged.serve.run(model, tokenizer=tokenizer)   # or a name; `hfpaged serve MODEL` on the command line
    app = hfpaged.serve.build_app(batcher)          # an ASGI application, for a stack of your own

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfpaged.errors import InvalidConfigError

if TYPE_CHECKING:
    from hfpaged.serve.app import build_app
    from hfpaged.serve.launch import run
    from hfpaged.serve.options import ServeOptions

_HOME_OF = {
    "ServeOptions": "hfpaged.serve.options",
    "build_app": "hfpaged.serve.app",
    "run": "hfpaged.serve.launch",
}

_EXTRA = ("fastapi", "starlette", "uvicorn", "httptools", "pydantic", "prometheus_client")

__all__ = ["ServeOptions", "build_app", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_HOME_OF[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise InvalidConfigError(
            f"a server needs {error.name}, which is not here; pip install 'hfpaged[serve]'"
        ) from error
    attribute = getattr(module, name)
    globals()[name] = attribute
    return attribute
