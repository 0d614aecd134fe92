"""How block events are published: the keys of vLLM's --kv-events-config, and what is our own."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_events.endpoint import Endpoint

SCHEMAS = ("map", "array")
# What vLLM's JSON has besides the fields below: whether there is anything to do at all.
_SWITCHES = ("enable_kv_cache_events", "publisher")
_COUNTS = ("buffer_steps", "hwm", "max_queue_size")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Of one publisher. Raises InvalidConfigError.

    endpoint            where the PUB socket is: tcp://HOST:PORT or ipc://FILE. An address of this machine is bound, any
                        other one connected to; port * takes a free one
    replay_endpoint     where a ROUTER socket answers those who have missed batches; None: nowhere
    topic               first frame of each message, which subscribers choose by
    buffer_steps        batches that are kept for them
    hwm                 messages that wait for one slow subscriber; he loses what comes beyond
    max_queue_size      changes of blocks that wait to be published; with more, all is told anew
    schema              "map": events and replays as vLLM 0.26 and later sends them; "array": as it did until 0.23
    int_hashes          hashes as their last 64 bits, as vLLM does by default; else all 32 bytes
    salted              publish prompts with a salt too, in clear as all others
    data_parallel_rank  which of several engines this is
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    schema: Literal["map", "array"] = "map"
    int_hashes: bool = True
    salted: bool = False
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name}={getattr(self, name)} keeps nothing; use 1 or more")
        if self.schema not in SCHEMAS:
            raise InvalidConfigError(f"schema={self.schema!r} is not known; use {' or '.join(SCHEMAS)}")
        if self.data_parallel_rank < 0:
            raise InvalidConfigError(f"data_parallel_rank={self.data_parallel_rank} is no place; use 0 or more")
        for text in self.endpoints:
            Endpoint.parse(text)
        if self.replay_endpoint is not None and not Endpoint.parse(self.replay_endpoint).is_here:
            raise InvalidConfigError(
                f"replay_endpoint={self.replay_endpoint!r} is not of this machine, and requests come in there; use "
                "tcp://127.0.0.1:PORT, or tcp://*:PORT for other machines"
            )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """That of the events, and that of replays if there is one."""
        return (self.endpoint,) if self.replay_endpoint is None else (self.endpoint, self.replay_endpoint)

    @classmethod
    def from_json(cls, text: str) -> KVEventsConfig | None:
        """What vLLM's --kv-events-config takes; None where it says that there are no events.
        Raises InvalidConfigError.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InvalidConfigError(f"{text!r} is no JSON ({error}); write {_EXAMPLE}") from error
        known = (*_SWITCHES, *(field.name for field in fields(cls)))
        unknown = [name for name in given if name not in known] if isinstance(given, dict) else []
        if not isinstance(given, dict) or unknown:
            what = f"{unknown[0]!r} is not known" if unknown else f"{text!r} is no object"
            raise InvalidConfigError(f"{what}; write {_EXAMPLE}, with any of: {', '.join(known)}")
        enabled, publisher = (given.pop(name, None) for name in _SWITCHES)
        if publisher not in (None, "zmq", "null") or enabled not in (None, True, False):
            raise InvalidConfigError(
                f"enable_kv_cache_events={enabled!r} and publisher={publisher!r}; the one is true or false, the other "
                '"zmq" or "null"'
            )
        config = cls(**given)
        return config if enabled and publisher != "null" else None


_EXAMPLE = """'{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'"""


def _check_type(name: str, value: Any, declared: str) -> None:
    kind = {"int": int, "bool": bool}.get(declared, str)
    is_none = value is None and declared.endswith("None")
    if not is_none and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise InvalidConfigError(f"{name}={value!r} is no {declared}")
