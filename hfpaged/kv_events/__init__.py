"""Block events for routers outside: which prefixes this engine holds, over ZMQ in the schema that vLLM publishes.

    with hfpaged.kv_events.publish(batcher, "tcp://127.0.0.1:5557", topic="kv-events"):
        ...                                        # or a KVPool, or a PagedCache; `hfpaged serve --kv-events-endpoint`

Importing this loads neither torch nor pyzmq.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfpaged.kv_events.config import KVEventsConfig

if TYPE_CHECKING:
    from hfpaged.kv_events.publishing import publish

__all__ = ["KVEventsConfig", "publish"]


def __getattr__(name: str) -> Any:
    if name != "publish":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("hfpaged.kv_events.publishing").publish
