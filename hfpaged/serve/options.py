"""What a server is told at its start, besides the engine's own sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Of one server.

    api_keys             by tenant; without any, everybody is let in
    salt_secret          what salts are derived from; None: random bytes, new at each start
    served_model_names   what /v1/models tells and requests may name; none: the model's own name
    adapters             folders of PEFT adapters by the name under which requests choose them
    request_timeout      seconds that one request may take, None for any
    send_timeout         seconds that a reader may leave what is sent to him unread
    shutdown_timeout     seconds that requests under way get when the server is told to stop
    max_body_bytes, max_header_bytes   of one request
    metrics_compat       "vllm": metrics under vLLM's names besides
    record_prompts       texts of prompts and answers may go into logs and spans
    """

    api_keys: Mapping[str, str] = field(default_factory=dict)
    salt_secret: bytes | None = None
    served_model_names: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    request_timeout: float | None = None
    send_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 4 * MIB
    max_header_bytes: int = 32 * 1024
    metrics_compat: str | None = None
    record_prompts: bool = False
