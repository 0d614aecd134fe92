"""PagedAttention for the model that you already have in transformers.

    cache = hfpaged.PagedCache(model)
    model.generate(**inputs, past_key_values=cache)

Importing this package changes nothing and loads neither torch nor transformers before a name is used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpaged.cache import PagedCache
    from hfpaged.cache_stats import CacheStats
    from hfpaged.engine.batcher import ContinuousBatcher
    from hfpaged.engine.delivery import StreamEvent
    from hfpaged.engine.outputs import RequestMetrics, RequestOutput, SequenceOutput
    from hfpaged.errors import (
        AdapterLostError,
        AutogradError,
        BatcherClosedError,
        CacheMismatchError,
        CallbackError,
        CheckpointError,
        HfpagedError,
        IntegrityError,
        InvalidConfigError,
        InvalidLogitsError,
        KVScalesError,
        MetricsError,
        MixedForwardError,
        NestedStepError,
        NotLeaderError,
        OutOfBlocksError,
        PackedForwardError,
        PrefixFileError,
        QueueFullError,
        RankLostError,
        RanksDifferError,
        RequestTooLongError,
        StreamingError,
        StreamPassedError,
        UnsupportedModelError,
        WindowPassedError,
    )
    from hfpaged.kv_pool import KVPool
    from hfpaged.memory_map import MemoryMap
    from hfpaged.patching import patch, patched, unpatch
    from hfpaged.prefix_report import PrefixReport, TokenDifference
    from hfpaged.watching.watch import watch

_HOMES = {
    "hfpaged.cache": ("PagedCache",),
    "hfpaged.cache_stats": ("CacheStats",),
    "hfpaged.engine.batcher": ("ContinuousBatcher",),
    "hfpaged.engine.delivery": ("StreamEvent",),
    "hfpaged.engine.outputs": ("RequestMetrics", "RequestOutput", "SequenceOutput"),
    "hfpaged.kv_pool": ("KVPool",),
    "hfpaged.memory_map": ("MemoryMap",),
    "hfpaged.patching": ("patch", "patched", "unpatch"),
    "hfpaged.prefix_report": ("PrefixReport", "TokenDifference"),
    "hfpaged.watching.watch": ("watch",),
    "hfpaged.errors": (
        "AdapterLostError",
        "AutogradError",
        "BatcherClosedError",
        "CallbackError",
        "CheckpointError",
        "InvalidLogitsError",
        "PackedForwardError",
        "RequestTooLongError",
        "CacheMismatchError",
        "HfpagedError",
        "IntegrityError",
        "InvalidConfigError",
        "KVScalesError",
        "MetricsError",
        "MixedForwardError",
        "NestedStepError",
        "NotLeaderError",
        "OutOfBlocksError",
        "PrefixFileError",
        "QueueFullError",
        "RankLostError",
        "RanksDifferError",
        "StreamPassedError",
        "StreamingError",
        "UnsupportedModelError",
        "WindowPassedError",
    ),
}
# `import hfpaged; hfpaged.telemetry.instrument()` needs no import of its own, nor does `hfpaged.serve.run(model)`.
_SUBPACKAGES = ("kv_events", "serve", "telemetry", "tensor_parallel")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdapterLostError",
    "AutogradError",
    "BatcherClosedError",
    "CacheMismatchError",
    "CacheStats",
    "CallbackError",
    "CheckpointError",
    "ContinuousBatcher",
    "HfpagedError",
    "IntegrityError",
    "InvalidConfigError",
    "InvalidLogitsError",
    "KVPool",
    "KVScalesError",
    "MemoryMap",
    "MetricsError",
    "MixedForwardError",
    "NestedStepError",
    "NotLeaderError",
    "OutOfBlocksError",
    "PackedForwardError",
    "PagedCache",
    "PrefixFileError",
    "PrefixReport",
    "QueueFullError",
    "RankLostError",
    "RanksDifferError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLongError",
    "SequenceOutput",
    "StreamEvent",
    "StreamPassedError",
    "StreamingError",
    "TokenDifference",
    "UnsupportedModelError",
    "WindowPassedError",
    "patch",
    "patched",
    "unpatch",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("hfpaged")
    if name in _SUBPACKAGES:
        return import_module(f"hfpaged.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hfpaged' has no attribute {name!r}")
    attribute = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
