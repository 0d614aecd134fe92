"""Publish the block events of a pool meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_events.config import KVEventsConfig

if TYPE_CHECKING:
    from hfpaged.kv_events.publisher import Publisher

_NEEDED = {"zmq": "pyzmq", "msgspec": "msgspec"}


@contextmanager
def publish(of: Any, endpoint: str | None = None, **settings: Any) -> Iterator[Publisher]:
    """Tell those who listen which blocks `of` (a ContinuousBatcher, a PagedCache or a KVPool) holds, as long as the
    context is open: all that it holds first, and then what comes and goes. Nobody who is slow slows the engine.

    Token ids of prompts and answers go there in clear: the address is one of this machine alone unless you say so.

    Args:
        endpoint: tcp://127.0.0.1:5557 by default.
        settings: fields of KVEventsConfig, such as replay_endpoint and topic.

    Raises InvalidConfigError for what is no pool, an address that cannot be had, and without the extra `events`.
    """
    config = KVEventsConfig(**settings if endpoint is None else {"endpoint": endpoint, **settings})
    with publishing(config, of) as publisher:
        assert publisher is not None
        yield publisher


@contextmanager
def publishing(config: KVEventsConfig | None, of: Any) -> Iterator[Publisher | None]:
    """As `publish`; nothing happens where `config` is None."""
    if config is None:
        yield None
        return
    publisher = _publisher(config, _pool_of(of))
    try:
        publisher.start()
        yield publisher
    finally:
        publisher.close()


def check_events(config: KVEventsConfig) -> None:
    """Before a model is loaded: raises InvalidConfigError where nothing can be published so."""
    require_libraries()
    sockets = import_module("hfpaged.kv_events.sockets")
    sockets.Sockets(config).close()


def require_libraries() -> None:
    """Raises InvalidConfigError without the extra `events`."""
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise InvalidConfigError(
            f"KV events need {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not here; pip "
            "install 'hfpaged[events]'"
        )


def _publisher(config: KVEventsConfig, pool: Any) -> Publisher:
    require_libraries()
    # Not before somebody wants events.
    from hfpaged.kv_events.feed import BlockFeed, is_in_pool
    from hfpaged.kv_events.publisher import Publisher
    from hfpaged.kv_events.sockets import warn_if_seen
    from hfpaged.kv_events.wire import HOST_MEDIUM, OWN_MEDIUM, Wire

    windows, has_news = [group.window for group in pool.groups], threading.Event()
    rest = windows, config.max_queue_size, has_news
    feeds = {OWN_MEDIUM: BlockFeed(pool.prefixes.index, is_in_pool, *rest)}
    if pool.swapping is not None and pool.swapping.host is not None:
        feeds[HOST_MEDIUM] = BlockFeed(pool.swapping.host, pool.swapping.host.has, *rest)
    publisher = Publisher(feeds, Wire(config, pool.groups, pool.block_size), config, pool.counts.block_events)
    warn_if_seen(config.endpoints)
    return publisher


def _pool_of(of: Any) -> Any:
    from hfpaged.kv_pool import KVPool

    pool = getattr(of, "pool", of)
    if not isinstance(pool, KVPool):
        raise InvalidConfigError(
            f"a {type(of).__name__} has no blocks to tell of; give a ContinuousBatcher, a PagedCache or a KVPool"
        )
    if not pool.groups:
        raise InvalidConfigError("this pool has no layers, so no block will ever come; give one of a model that has")
    return pool
