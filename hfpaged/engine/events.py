"""Frozen records of all that happens in the engine, for those who watch it. Times in seconds since the epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hfpaged.clock import now
from hfpaged.engine.outputs import FinishReason, RequestMetrics
from hfpaged.prefix_block import Origin

if TYPE_CHECKING:
    from hfpaged.engine.params import RequestParams


@dataclass(frozen=True, kw_only=True)
class Event:
    """`time` is when it happened."""

    time: float = field(default_factory=lambda: now())  # found when it is made: tests put another clock there


@dataclass(frozen=True, kw_only=True)
class RequestEvent(Event):
    """Something that happened to one request."""

    request_id: str
    tenant: str = ""


@dataclass(frozen=True, kw_only=True)
class Rejected(RequestEvent):
    """A request was refused before it began to wait. Told in the thread of its caller, in the middle of anything;
    `request_id` is empty where it had none yet.
    """

    error: BaseException


@dataclass(frozen=True, kw_only=True)
class Arrived(RequestEvent):
    """`context` is that of the caller who brought it, `origin` what stands for it in the prefixes that it computes;
    `adapter` the one that it chose.
    """

    prompt_tokens: int
    priority: int
    params: RequestParams
    origin: Origin
    context: Context
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Admitted(RequestEvent):
    """Its first blocks are granted, or after a preemption new ones (`again`). `waits` are the seconds that it waited
    since it arrived or was preempted, by cause; their sum is `queue_time`.
    """

    queue_time: float
    again: bool
    waits: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PrefixMatched(RequestEvent):
    """Its prompt was looked up, once, when it was admitted first: of `queried` tokens `hit` need not be computed. They
    were computed by `computed_by`, each named once; it `waited_for` one of them if it did. `reason` is why there were
    not more: see PrefixReport, "complete" for a prompt that is all known.
    """

    hit: int
    queried: int
    reason: str
    computed_by: tuple[Origin, ...] = ()
    waited_for: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prefilled(RequestEvent):
    """A chunk of its tokens was computed in step `number`: `tokens` from position `start` on, from `began` to `time`.
    After a preemption they may have been computed before.
    """

    number: int
    began: float
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class FirstToken(RequestEvent):
    time_to_first_token: float


@dataclass(frozen=True, kw_only=True)
class Preempted(RequestEvent):
    """Its blocks were taken back; `lost` tokens may have to be computed again. It had `output_tokens` by then."""

    lost: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Ended(RequestEvent):
    """The one final event of a request. `output_tokens` are the new ones in all its sequences, `sequence_tokens` those
    of each.
    """

    prompt_tokens: int
    output_tokens: int
    sequence_tokens: tuple[int, ...]
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True)
class Finished(Ended):
    """It came to its end."""

    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class Aborted(Ended):
    """It was given up by its owner."""


@dataclass(frozen=True, kw_only=True)
class Failed(Ended):
    """It met an error."""

    error: BaseException


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """One step. It computed `num_tokens` tokens of `num_sequences`, none where its forward failed. `seconds` is all of
    it; of these the model's forward and the sampler took theirs, and what is left is scheduling and bookkeeping.
    `token_gaps`: how many requests got a token so many seconds after their last one. `context_tokens`: the stored
    tokens that attention read, in the mean of the layer groups.
    """

    number: int
    num_sequences: int
    num_tokens: int
    num_prefill_tokens: int
    num_sampled: int
    num_waiting: int
    num_running: int
    preemptions: int
    seconds: float
    forward_seconds: float
    sampling_seconds: float
    blocks_used: int
    blocks_total: int
    token_gaps: Mapping[float, int]
    context_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ShadowCompared(Event):
    """A request that has ended was computed once more with the native cache. Of each token that was compared `kl` is
    KL(native || live) in nats; `agreed` of them have the same likeliest token in both. It took `seconds`.
    """

    kv_format: str
    kl: tuple[float, ...]
    agreed: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ShadowDropped(Event):
    """A request was to be computed once more, and is not, for a `reason` in a word. That took `seconds` for nothing."""

    kv_format: str
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepStuck(Event):
    """A step has not come back for so many seconds."""

    number: int
    seconds: float


Hook = Callable[[Event], None]
