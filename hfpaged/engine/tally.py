"""What one batcher counts from its events: all counters and histograms that no one could read from its state later.

For each request `received = finished + aborted + rejected + in flight` holds after each event, and each histogram of
ended requests has as many values as there are finished (failed ones among them) and aborted requests.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from hfpaged.engine import buckets, events
from hfpaged.engine.sums import Key, Sums
from hfpaged.errors import BatcherClosedError, InvalidConfigError, RequestTooLongError

if TYPE_CHECKING:
    from hfpaged.engine.request import Request

RECEIVED: Key = ("hfpaged_requests_received_total",)
REJECTED = "hfpaged_requests_rejected_total"
FINISHED = "hfpaged_requests_finished_total"
ABORTED: Key = ("hfpaged_requests_aborted_total",)
PREEMPTIONS: Key = ("hfpaged_preemptions_total",)
PREEMPTED_TOKENS: Key = ("hfpaged_preempted_tokens_total",)
PROMPT_TOKENS: Key = ("hfpaged_prompt_tokens_total",)
COMPUTED_TOKENS = "hfpaged_computed_tokens_total"
GENERATED_TOKENS: Key = ("hfpaged_generated_tokens_total",)
WAIT_SECONDS = "hfpaged_wait_seconds_total"
BYTE_SECONDS: Key = ("hfpaged_kv_byte_seconds_total",)
LOOKUPS = "hfpaged_prefix_lookups_total"
STEP_SECONDS = "hfpaged_step_seconds_total"

DURATION: Key = ("hfpaged_request_duration_seconds",)
QUEUE: Key = ("hfpaged_request_queue_seconds",)
PROMPT_LENGTH: Key = ("hfpaged_request_prompt_tokens",)
OUTPUT_LENGTH: Key = ("hfpaged_request_output_tokens",)
SEQUENCE_LENGTH: Key = ("hfpaged_sequence_tokens",)
FIRST_TOKEN: Key = ("hfpaged_time_to_first_token_seconds",)
INTER_TOKEN: Key = ("hfpaged_inter_token_latency_seconds",)
PER_TOKEN: Key = ("hfpaged_time_per_output_token_seconds",)
STEP_DURATION = "hfpaged_step_duration_seconds"
STEP_TOKENS = "hfpaged_step_tokens"
STEP_SEQUENCES: Key = ("hfpaged_step_sequences",)

# What only others' names for our numbers want to know.
CACHED_TOKENS: Key = ("prompt tokens cached",)
ALL_STEP_TOKENS: Key = ("step tokens",)
PREFILL_TIME: Key = ("prefill time",)
DECODE_TIME: Key = ("decode time",)
RUN_TIME: Key = ("run time",)

PHASES = ("prefill", "decode")
CAUSES = ("blocks", "seats", "budget", "prefix", "turn")
PARTS = ("forward", "sampling", "scheduling")
REASONS = ("complete", "never_seen", "below_block_size", "evicted", "left_window", "other_key", "differs")

_REFUSALS: dict[type[BaseException], str] = {
    RequestTooLongError: "too_long",
    InvalidConfigError: "invalid",
    BatcherClosedError: "closed",
}
_HISTOGRAMS: dict[Key, tuple[float, ...]] = {
    DURATION: buckets.DURATION,
    QUEUE: buckets.DURATION,
    PROMPT_LENGTH: buckets.LENGTH,
    OUTPUT_LENGTH: buckets.LENGTH,
    SEQUENCE_LENGTH: buckets.LENGTH,
    FIRST_TOKEN: buckets.FIRST_TOKEN,
    INTER_TOKEN: buckets.PER_TOKEN,
    PER_TOKEN: buckets.PER_TOKEN,
    STEP_SEQUENCES: buckets.STEP_TOKENS,
    ALL_STEP_TOKENS: buckets.STEP_TOKENS,
    PREFILL_TIME: buckets.DURATION,
    DECODE_TIME: buckets.DURATION,
    RUN_TIME: buckets.DURATION,
    **{(STEP_DURATION, phase): buckets.STEP for phase in PHASES},
    **{(STEP_TOKENS, phase): buckets.STEP_TOKENS for phase in PHASES},
}


def label(words: str) -> str:
    """As the value of a label: "below block size" is below_block_size."""
    return re.sub(r"\W+", "_", words.lower()).strip("_")


def refusal(error: BaseException) -> str:
    """Why a request was refused, in a word."""
    for kind, reason in _REFUSALS.items():
        if isinstance(error, kind):
            return reason
    return label(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error"))) or "error"


class InFlight:
    """A request between its arrival and its end. `waited`: seconds by cause that are counted already; `preempted`: its
    groups that wait because their blocks were taken back.
    """

    __slots__ = ("preempted", "prompt_tokens", "waited")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.waited: dict[str, float] = {}
        self.preempted = 0


class Tally:
    """A hook that counts. `sums` and `in_flight` (by id) change under its lock; read them by `read`.

    Those who refuse requests tell of it in any thread. `requests` are those of the batcher, by id: of one that is
    dropped while they run they count as given up.
    """

    def __init__(self, model_name: str = "", requests: Mapping[str, Request] | None = None) -> None:
        self.model_name = model_name
        self.sums = _begin()
        self.last_step_time: float | None = None
        self._requests = requests if requests is not None else {}
        self._in_flight: dict[str, InFlight] = {}
        self._lock = threading.Lock()

    def __call__(self, event: events.Event) -> None:
        count = _COUNT.get(type(event))
        if count is not None:
            with self._lock:
                count(self, event)

    def read(self) -> tuple[Sums, dict[str, InFlight]]:
        """The sums and the requests in flight at one moment: copies, if not of those requests."""
        sums = Sums()
        with self._lock:
            sums.add(self.sums)
            return sums, dict(self._in_flight)

    def add(self, other: Tally) -> None:
        """Count what `other` has counted, too."""
        sums, in_flight = other.read()
        with self._lock:
            self.sums.add(sums)
            self._in_flight |= in_flight
            times = [time for time in (self.last_step_time, other.last_step_time) if time is not None]
            self.last_step_time = max(times, default=None)

    def owner_is_gone(self, time: float) -> None:
        """The batcher was dropped: what it had in flight nobody will end."""
        from hfpaged.engine.teller import final_event

        for name in list(self._in_flight):
            request = self._requests[name]
            request.is_finished, request.finished_time = True, request.finished_time or time
            self(final_event(request, "abort"))
        self._requests = {}

    def _rejected(self, event: events.Rejected) -> None:
        self.sums.count(RECEIVED)
        self.sums.count((REJECTED, refusal(event.error)))

    def _arrived(self, event: events.Arrived) -> None:
        self.sums.count(RECEIVED)
        self._in_flight[event.request_id] = InFlight(event.prompt_tokens)

    def _admitted(self, event: events.Admitted) -> None:
        request = self._in_flight[event.request_id]
        if event.again:
            request.preempted -= 1
        else:
            self.sums.count(PROMPT_TOKENS, request.prompt_tokens)
        for cause, seconds in event.waits.items():
            self.sums.count((WAIT_SECONDS, cause), seconds)
            request.waited[cause] = request.waited.get(cause, 0.0) + seconds

    def _matched(self, event: events.PrefixMatched) -> None:
        self.sums.count((LOOKUPS, label(event.reason)))
        self.sums.count(CACHED_TOKENS, event.hit)

    def _preempted(self, event: events.Preempted) -> None:
        self._in_flight[event.request_id].preempted += 1
        self.sums.count(PREEMPTIONS)
        self.sums.count(PREEMPTED_TOKENS, event.lost)

    def _first_token(self, event: events.FirstToken) -> None:
        self.sums.histograms[FIRST_TOKEN].observe(event.time_to_first_token)

    def _finished(self, event: events.Finished) -> None:
        self.sums.count((FINISHED, event.finish_reason))
        self._ended(event)

    def _failed(self, event: events.Failed) -> None:
        self.sums.count((FINISHED, "error"))
        self._ended(event)

    def _aborted(self, event: events.Aborted) -> None:
        self.sums.count(ABORTED)
        self._ended(event)

    def _ended(self, event: events.Ended) -> None:
        request, metrics, observed = self._in_flight.pop(event.request_id), event.metrics, self.sums.histograms
        for cause, seconds in metrics.waits.items():
            rest = seconds - request.waited.get(cause, 0.0)
            if rest > 0:  # it ended while it waited
                self.sums.count((WAIT_SECONDS, cause), rest)
        self.sums.count(BYTE_SECONDS, metrics.byte_seconds)
        end = event.time if metrics.finished_time is None else metrics.finished_time
        begin = end if metrics.admitted_time is None else metrics.admitted_time
        observed[DURATION].observe(end - metrics.arrival_time)
        observed[QUEUE].observe(begin - metrics.arrival_time)
        observed[PROMPT_LENGTH].observe(event.prompt_tokens)
        observed[OUTPUT_LENGTH].observe(event.output_tokens)
        for tokens in event.sequence_tokens:
            observed[SEQUENCE_LENGTH].observe(event.prompt_tokens + tokens)
        self._count_times(metrics.admitted_time, metrics.first_token_time, end, max(event.sequence_tokens, default=0))

    def _count_times(self, began: float | None, first_token: float | None, end: float, longest: int) -> None:
        observed = self.sums.histograms
        if began is not None:
            observed[RUN_TIME].observe(end - began)
        if began is not None and first_token is not None:
            observed[PREFILL_TIME].observe(first_token - began)
            observed[DECODE_TIME].observe(end - first_token)
            if longest > 1:
                observed[PER_TOKEN].observe((end - first_token) / (longest - 1))

    def _step(self, event: events.StepFinished) -> None:
        self.last_step_time = event.time
        count, observed = self.sums.count, self.sums.histograms
        count((STEP_SECONDS, "forward"), event.forward_seconds)
        count((STEP_SECONDS, "sampling"), event.sampling_seconds)
        rest = event.seconds - event.forward_seconds - event.sampling_seconds
        count((STEP_SECONDS, "scheduling"), max(rest, 0.0))
        for seconds, requests in event.token_gaps.items():
            observed[INTER_TOKEN].observe(seconds, requests)
        if not event.num_sequences:
            return
        decodes = event.num_tokens - event.num_prefill_tokens
        count(GENERATED_TOKENS, event.num_sampled)
        observed[STEP_SEQUENCES].observe(event.num_sequences)
        observed[ALL_STEP_TOKENS].observe(event.num_tokens)
        observed[STEP_DURATION, "prefill" if event.num_prefill_tokens else "decode"].observe(event.seconds)
        for phase, tokens in zip(PHASES, (event.num_prefill_tokens, decodes), strict=True):
            if tokens:
                count((COMPUTED_TOKENS, phase), tokens)
                observed[STEP_TOKENS, phase].observe(tokens)


_COUNT: dict[type[events.Event], Callable[[Tally, Any], None]] = {
    events.Rejected: Tally._rejected,
    events.Arrived: Tally._arrived,
    events.Admitted: Tally._admitted,
    events.PrefixMatched: Tally._matched,
    events.Preempted: Tally._preempted,
    events.FirstToken: Tally._first_token,
    events.Finished: Tally._finished,
    events.Failed: Tally._failed,
    events.Aborted: Tally._aborted,
    events.StepFinished: Tally._step,
}


def _begin() -> Sums:
    """All at 0."""
    sums = Sums()
    for key in (RECEIVED, ABORTED, PREEMPTIONS, PREEMPTED_TOKENS, PROMPT_TOKENS, GENERATED_TOKENS, BYTE_SECONDS,
                CACHED_TOKENS):  # fmt: skip
        sums.numbers[key] = 0
    labels: dict[str, Collection[str]] = {
        REJECTED: _REFUSALS.values(), FINISHED: ("stop", "length", "error"), COMPUTED_TOKENS: PHASES,
        WAIT_SECONDS: CAUSES, LOOKUPS: REASONS, STEP_SECONDS: PARTS,
    }  # fmt: skip
    for metric, values in labels.items():
        sums.name(metric, values)
    for key, bounds in _HISTOGRAMS.items():
        sums.histogram(key, bounds)
    return sums
