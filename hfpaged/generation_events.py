"""Frozen records of what happens in calls of generate() with a PagedCache, for those who watch them. Times in seconds
since the epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hfpaged.clock import now
from hfpaged.prefix_block import Origin

logger = logging.getLogger("hfpaged")


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationCall:
    """One call, told apart from others by identity. `rows` of prompts have `prompt_tokens` in all, padding not counted.
    `settings` are those that the caller or the model's defaults chose, of max_new_tokens, temperature, top_p, top_k,
    num_beams and num_return_sequences. `origin` stands for it in the prefixes that it computes.
    """

    model_name: str
    rows: int
    prompt_tokens: int
    settings: Mapping[str, Any]
    kv_format: str
    origin: Origin
    began: float = field(default_factory=lambda: now())


@dataclass(frozen=True, kw_only=True)
class GenerationEvent:
    """`time` is when it happened."""

    call: GenerationCall
    time: float = field(default_factory=lambda: now())


@dataclass(frozen=True, kw_only=True)
class GenerationBegan(GenerationEvent):
    """Told in the thread and the context of the caller, as all of these are."""


@dataclass(frozen=True, kw_only=True)
class GenerationPrefilled(GenerationEvent):
    """The first forward is over, and with it the prompt, as a rule; it `began` then. The cache held `past` tokens from
    earlier calls. Of the others `queried` were looked up and `hit` of them found, computed by `computed_by`; `reasons`
    are those of its rows that their matches ended, see PrefixReport.
    """

    began: float
    past: int
    queried: int
    hit: int
    reasons: tuple[str, ...]
    computed_by: tuple[Origin, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerationEnded(GenerationEvent):
    """The one last event of a call. `first_token_time` is None where it came to none. Memory as in RequestMetrics.
    `error` is what it raised; then `output_tokens` is 0, as nobody has got any.
    """

    first_token_time: float | None
    forwards: int
    output_tokens: int
    peak_blocks: int
    peak_bytes: int
    shared_bytes: int
    byte_seconds: float
    error: BaseException | None = None


GenerationHook = Callable[[GenerationEvent], None]

_hooks: list[GenerationHook] = []
# Told when somebody begins or ceases to watch: without anybody nothing is recorded.
listeners: list[Callable[[], None]] = []


def is_watched() -> bool:
    """Whether anybody is told."""
    return bool(_hooks)


def watch(hook: GenerationHook) -> None:
    """Tell `hook` of all calls in this process."""
    _hooks.append(hook)
    for listener in listeners:
        listener()


def unwatch(hook: GenerationHook) -> None:
    """Undo `watch`."""
    if hook in _hooks:
        _hooks.remove(hook)
    for listener in listeners:
        listener()


def emit(event: GenerationEvent) -> None:
    """Tell all hooks; who only watches must not stop the work. Ctrl-C in one of them is raised when all know."""
    interrupt: BaseException | None = None
    for hook in list(_hooks):
        try:
            hook(event)
        except Exception:
            logger.exception("a hook raised on %s", type(event).__name__)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
