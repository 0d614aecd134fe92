"""Frozen records of all that happens in the engine, for those who watch it. Times in seconds since the epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hfpaged.engine.outputs import FinishReason, RequestMetrics

# One origin for all times: the clock of the wall may jump, and differences must not.
_ORIGIN = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since the epoch, never going back."""
    return _ORIGIN + time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Event:
    """`time` is when it happened."""

    time: float = field(default_factory=now)


@dataclass(frozen=True, kw_only=True)
class RequestEvent(Event):
    """Something that happened to one request."""

    request_id: str
    tenant: str = ""


@dataclass(frozen=True, kw_only=True)
class Arrived(RequestEvent):
    prompt_tokens: int
    priority: int


@dataclass(frozen=True, kw_only=True)
class Admitted(RequestEvent):
    """Its first blocks are granted, or after a preemption new ones (`again`)."""

    queue_time: float  # seconds since it arrived or was preempted
    again: bool


@dataclass(frozen=True, kw_only=True)
class PrefixHit(RequestEvent):
    """Of `queried` tokens `hit` were found in the pool, computed by the request that it `waited_for` if it did."""

    hit: int
    queried: int
    waited_for: str | None = None


@dataclass(frozen=True, kw_only=True)
class FirstToken(RequestEvent):
    time_to_first_token: float


@dataclass(frozen=True, kw_only=True)
class Preempted(RequestEvent):
    """Its blocks were taken back; `lost` tokens may have to be computed again."""

    lost: int


@dataclass(frozen=True, kw_only=True)
class Finished(RequestEvent):
    """The one final event of a request that came to its end."""

    finish_reason: FinishReason
    output_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True)
class Aborted(RequestEvent):
    """The one final event of a request that was given up by its owner."""

    output_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True)
class Failed(RequestEvent):
    """The one final event of a request that met an error."""

    error: BaseException
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """One step. `seconds` is all of it; of these the model's forward and the sampler took theirs, and what is left is
    scheduling and bookkeeping.
    """

    number: int
    num_sequences: int
    num_tokens: int
    num_prefill_tokens: int
    num_waiting: int
    num_running: int
    preemptions: int
    seconds: float
    forward_seconds: float
    sampling_seconds: float
    blocks_used: int
    blocks_total: int


@dataclass(frozen=True, kw_only=True)
class StepStuck(Event):
    """A step has not come back for so many seconds."""

    number: int
    seconds: float


Hook = Callable[[Event], None]
