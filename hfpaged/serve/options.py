"""What a server is told at its start, besides the engine's own sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_events.config import KVEventsConfig

# A body is parsed in one go, in which nothing else happens on the event loop. Of 512 KiB that takes 26 ms for token ids
# and 2 ms for text, and less than 50 ms for what else a client may think of. A longer context needs more, 8 bytes for
# each of its tokens: an id with its comma, or a word and a half.
MIN_BODY_BYTES, BYTES_OF_TOKEN = 512 << 10, 8
MAX_HEADER_BYTES = 32 << 10


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Of one server. Raises InvalidConfigError.

    api_keys             by tenant; without any, everybody is let in
    salt_secret          what salts are derived from; None: random bytes, new at each start
    served_model_names   what /v1/models tells and requests may name; none: the model's own name
    adapters             folders of PEFT adapters by the name under which requests choose them
    request_timeout      seconds that one request may take, None for any
    send_timeout         seconds that a reader may leave what is sent to him unread, or a writer take for his request
    shutdown_timeout     seconds that requests under way get when the server is told to stop
    max_body_bytes       of one request; None: 512 KiB, or as much as the model's context needs
    max_header_bytes     of one request
    metrics_compat       "vllm": metrics under vLLM's names besides
    record_prompts       texts of prompts and answers may go into logs and spans
    record               a file that gets a trace of the requests, without any text
    kv_events            where routers outside are told which prefixes are here; None: nowhere
    """

    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # whatever prints options, no key is told
    salt_secret: bytes | None = field(default=None, repr=False)
    served_model_names: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    request_timeout: float | None = None
    send_timeout: float = 30.0
    shutdown_timeout: float = 25.0
    max_body_bytes: int | None = None
    max_header_bytes: int = MAX_HEADER_BYTES
    metrics_compat: str | None = None
    record_prompts: bool = False
    record: str | None = None
    kv_events: KVEventsConfig | None = None

    def __post_init__(self) -> None:
        if any(not key for key in self.api_keys.values()):
            raise InvalidConfigError("an API key is empty, which would let everybody in; leave it out, or give one")
        for name in ("request_timeout", "send_timeout", "max_body_bytes", "max_header_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidConfigError(f"{name}={value} leaves nothing; use more than 0")
        if self.shutdown_timeout < 0:
            raise InvalidConfigError(f"shutdown_timeout={self.shutdown_timeout} is no time; use 0 or more seconds")
        check_names(self.served_model_names, self.adapters)


def check_names(models: Iterable[str], adapters: Iterable[str]) -> None:
    """Raises InvalidConfigError for a name that a model and an adapter have: requests choose by names."""
    if both := set(models) & set(adapters):
        raise InvalidConfigError(f"{sorted(both)[0]!r} is a name of the model and of an adapter; use two names")
