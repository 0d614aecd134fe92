"""The flags of `hfpaged serve` about block events: those that people need, and vLLM's JSON for the rest."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_events.config import KVEventsConfig
from hfpaged.kv_events.endpoint import Endpoint

# By the field that each sets.
_FLAGS = {
    "endpoint": "--kv-events-endpoint",
    "replay_endpoint": "--kv-events-replay-endpoint",
    "topic": "--kv-events-topic",
    "salted": "--kv-events-salted",
}


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Declare them."""
    where: dict[str, Any] = {"type": endpoint, "metavar": "ENDPOINT"}
    for name, line, why, rest in (
        ("endpoint",
         "tell routers which prefixes are here, over ZMQ in vLLM's schema: tcp://HOST:PORT or ipc://FILE",
         "none: such events hold the token ids of prompts in clear",
         where),
        ("replay_endpoint",
         "where routers ask for events that they have missed, tcp://HOST:PORT or ipc://FILE",
         "none: a router knows a gap by the numbers, and no more",
         where),
        ("topic",
         "first frame of each message, such as kv@POD@MODEL",
         "empty, as vLLM's: whoever subscribes to everything gets it",
         {"metavar": "TOPIC"}),
        ("salted",
         "tell of the prompts of API keys, and of those with a cache_salt, too",
         "off: tenants' words stay here, and routers cannot tell whose they are",
         {"action": "store_true", "default": None}),
    ):  # fmt: skip
        group.add_argument(_FLAGS[name], help=f"{line} (default: {why})", **rest)
    group.add_argument(
        "--kv-events-config", type=config, metavar="JSON",
        help="the same and more with the keys that vLLM has; the other flags stand above it (default: none: no events)",
    )  # fmt: skip


def config_of(args: argparse.Namespace) -> KVEventsConfig | None:
    """What is to be published, None for nothing. Raises InvalidConfigError."""
    given = {field: getattr(args, flag[2:].replace("-", "_")) for field, flag in _FLAGS.items()}
    given = {field: value for field, value in given.items() if value is not None}
    base: KVEventsConfig | None = args.kv_events_config
    if base is None and given and "endpoint" not in given:
        flag = _FLAGS[next(iter(given))]
        raise InvalidConfigError(
            f"{flag} says how events are published, and there are none without --kv-events-endpoint; give that, too"
        )
    if (base is not None or given) and not args.enable_prefix_caching:
        raise InvalidConfigError(
            "events tell which prefixes are known, and --no-enable-prefix-caching knows none; leave one of the two out"
        )
    return replace(base or KVEventsConfig(), **given) if base is not None or given else None


def check_single(events: KVEventsConfig | None) -> None:
    """That a server with replicas publishes none. Raises InvalidConfigError."""
    if events is not None:
        raise InvalidConfigError(
            "KV events are for a router outside that chooses between engines, and in front of replicas Ray Serve's "
            "chooses; start each engine by itself, with --kv-events-endpoint and without --replicas"
        )


def endpoint(text: str) -> str:
    """tcp://HOST:PORT or ipc://FILE."""
    try:
        Endpoint.parse(text)
    except InvalidConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def config(text: str) -> KVEventsConfig | None:
    """vLLM's JSON, such as {"enable_kv_cache_events": true}."""
    try:
        return KVEventsConfig.from_json(text)
    except InvalidConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
