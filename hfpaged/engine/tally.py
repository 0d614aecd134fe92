"""What one batcher counts from its events: all counters and histograms that no one could read from its state later.

For requests `received = finished + aborted + rejected + in flight` holds after each event, and each histogram of ended
ones has as many values as there are finished (failed ones among them) and aborted ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hfpaged.clock import now
from hfpaged.engine import events
from hfpaged.engine import tally_keys as keys
from hfpaged.engine.sums import Sums
from hfpaged.engine.teller import final_event

if TYPE_CHECKING:
    from hfpaged.engine.request import Request


class InFlight:
    """A request between its arrival and its end. `waited`: seconds by cause that are counted already. One that
    `was_preempted` and holds no block waits because its blocks were taken back.
    """

    __slots__ = ("prompt_tokens", "waited", "was_preempted")

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.waited: dict[str, float] = {}
        self.was_preempted = False


class Tally:
    """A hook that counts. `sums` and `in_flight` (by id) change under its lock; read them by `read`.

    Those who refuse requests tell of it in any thread. `requests` are those of the batcher, by id: of one that is
    dropped while they run they count as given up.
    """

    def __init__(self, model_name: str = "", requests: Mapping[str, Request] | None = None) -> None:
        self.model_name = model_name
        self.sums = keys.all_at_zero()
        self.last_step_time: float | None = None
        self._num_unseen = (
            0  # that were added and wait for a step to tell of them; -1 for a moment, where that is faster
        )
        self._busy_since = 0.0
        self._requests = requests if requests is not None else {}
        self._in_flight: dict[str, InFlight] = {}
        self._lock = threading.RLock()  # the garbage collector may run a finalizer here, and that abort a request

    def __call__(self, event: events.Event) -> None:
        count = _COUNT.get(type(event))
        if count is not None:
            with self._lock:
                count(self, event)

    def added(self) -> None:
        """A request waits for the next step, which tells that it has arrived. Until then nobody may make one."""
        with self._lock:
            self._note_work(now())
            self._num_unseen += 1

    def begin_shadow(self, kv_format: str) -> None:
        """A sample of requests will be computed once more: begin with 0."""
        with self._lock:
            keys.shadow_at_zero(self.sums, kv_format)

    def read(self) -> tuple[Sums, dict[str, InFlight]]:
        """The sums and the requests in flight at one moment: copies, if not of those requests. Those that were added
        count as received.
        """
        sums = Sums()
        with self._lock:
            sums.add(self.sums)
            sums.count(keys.RECEIVED, max(self._num_unseen, 0))
            return sums, dict(self._in_flight)

    def stalled_seconds(self) -> float:
        """How long requests have been there by now without the end of a step; 0 where there are none."""
        with self._lock:
            since = max(self._busy_since, self.last_step_time or 0.0)
            return max(now() - since, 0.0) if self._has_work else 0.0

    @property
    def _has_work(self) -> bool:
        return bool(self._in_flight) or self._num_unseen > 0

    def _note_work(self, time: float) -> None:
        if not self._has_work:
            self._busy_since = time

    def add(self, other: Tally) -> None:
        """Count what `other` has counted, too. What it has in flight is its own: ids are those of one batcher."""
        sums, _ = other.read()
        with self._lock:
            self.sums.add(sums)
            times = [time for time in (self.last_step_time, other.last_step_time) if time is not None]
            self.last_step_time = max(times, default=None)

    def owner_is_gone(self, time: float) -> None:
        """The batcher was dropped: what it had in flight nobody will end."""
        for request in list(self._requests.values()):
            if request.is_finished:
                continue
            if request.request_id not in self._in_flight:
                self._count_arrival(request.request_id, request.num_prompt_tokens)
            request.is_finished, request.finished_time = True, time
            self(final_event(request, "abort"))
        self._requests = {}

    def _request(self, event: events.RequestEvent) -> InFlight:
        if event.request_id not in self._in_flight:  # Ctrl-C swallowed its arrival
            self._count_arrival(event.request_id, 0)
        return self._in_flight[event.request_id]

    def _rejected(self, event: events.Rejected) -> None:
        self.sums.count(keys.RECEIVED)
        self.sums.count((keys.REJECTED, keys.refusal(event.error)))

    def _arrived(self, event: events.Arrived) -> None:
        self._note_work(event.time)
        self._count_arrival(event.request_id, event.prompt_tokens)

    def _count_arrival(self, request_id: str, prompt_tokens: int) -> None:
        self._num_unseen -= 1
        self.sums.count(keys.RECEIVED)
        self._in_flight[request_id] = InFlight(prompt_tokens)

    def _admitted(self, event: events.Admitted) -> None:
        request = self._request(event)
        if not event.again:
            self.sums.count(keys.PROMPT_TOKENS, request.prompt_tokens)
        for cause, seconds in event.waits.items():
            self.sums.count((keys.WAIT_SECONDS, cause), seconds)
            request.waited[cause] = request.waited.get(cause, 0.0) + seconds

    def _matched(self, event: events.PrefixMatched) -> None:
        self.sums.count((keys.LOOKUPS, keys.label(event.reason)))
        self.sums.count(keys.CACHED_TOKENS, event.hit)

    def _preempted(self, event: events.Preempted) -> None:
        self._request(event).was_preempted = True
        self.sums.count(keys.PREEMPTIONS)
        self.sums.count(keys.PREEMPTED_TOKENS, event.lost)

    def _first_token(self, event: events.FirstToken) -> None:
        self.sums.histograms[keys.FIRST_TOKEN].observe(event.time_to_first_token)

    def _finished(self, event: events.Finished) -> None:
        self.sums.count((keys.FINISHED, event.finish_reason))
        self._ended(event)

    def _failed(self, event: events.Failed) -> None:
        self.sums.count((keys.FINISHED, "error"))
        self._ended(event)

    def _aborted(self, event: events.Aborted) -> None:
        self.sums.count(keys.ABORTED)
        self._ended(event)

    def _ended(self, event: events.Ended) -> None:
        request, metrics, observed = self._request(event), event.metrics, self.sums.histograms
        del self._in_flight[event.request_id]
        for cause, seconds in metrics.waits.items():
            rest = seconds - request.waited.get(cause, 0.0)
            if rest > 0:  # it ended while it waited
                self.sums.count((keys.WAIT_SECONDS, cause), rest)
        self.sums.count(keys.BYTE_SECONDS, metrics.byte_seconds)
        end = event.time if metrics.finished_time is None else metrics.finished_time
        begin = end if metrics.admitted_time is None else metrics.admitted_time
        observed[keys.DURATION].observe(end - metrics.arrival_time)
        observed[keys.QUEUE].observe(begin - metrics.arrival_time)
        observed[keys.PROMPT_LENGTH].observe(event.prompt_tokens)
        observed[keys.OUTPUT_LENGTH].observe(event.output_tokens)
        for tokens in event.sequence_tokens:
            observed[keys.SEQUENCE_LENGTH].observe(event.prompt_tokens + tokens)
        self._count_times(metrics.admitted_time, metrics.first_token_time, end, max(event.sequence_tokens, default=0))

    def _count_times(self, began: float | None, first_token: float | None, end: float, longest: int) -> None:
        observed = self.sums.histograms
        if began is not None:
            observed[keys.RUN_TIME].observe(end - began)
        if began is not None and first_token is not None:
            observed[keys.PREFILL_TIME].observe(first_token - began)
            observed[keys.DECODE_TIME].observe(end - first_token)
            if longest > 1:
                observed[keys.PER_TOKEN].observe((end - first_token) / (longest - 1))

    def _step(self, event: events.StepFinished) -> None:
        self.last_step_time = event.time
        count, observed = self.sums.count, self.sums.histograms
        count((keys.STEP_SECONDS, "forward"), event.forward_seconds)
        count((keys.STEP_SECONDS, "sampling"), event.sampling_seconds)
        rest = event.seconds - event.forward_seconds - event.sampling_seconds
        count((keys.STEP_SECONDS, "scheduling"), max(rest, 0.0))
        for seconds, requests in event.token_gaps.items():
            observed[keys.INTER_TOKEN].observe(seconds, requests)
        if not event.num_sequences:
            return
        decodes = event.num_tokens - event.num_prefill_tokens
        count(keys.GENERATED_TOKENS, event.num_sampled)
        observed[keys.STEP_SEQUENCES].observe(event.num_sequences)
        observed[keys.ALL_STEP_TOKENS].observe(event.num_tokens)
        observed[keys.STEP_DURATION, "prefill" if event.num_prefill_tokens else "decode"].observe(event.seconds)
        for phase, tokens in zip(keys.PHASES, (event.num_prefill_tokens, decodes), strict=True):
            if tokens:
                count((keys.COMPUTED_TOKENS, phase), tokens)
                observed[keys.STEP_TOKENS, phase].observe(tokens)

    def _shadow_compared(self, event: events.ShadowCompared) -> None:
        count, label = self.sums.count, event.kv_format
        count((keys.SHADOW_REQUESTS, label))
        count((keys.SHADOW_TOKENS, label), len(event.kl))
        count((keys.SHADOW_AGREED, label), event.agreed)
        count((keys.SHADOW_SECONDS, label), event.seconds)
        for kl in event.kl:
            self.sums.histograms[keys.SHADOW_KL, label].observe(max(kl, 0.0))  # rounding may go below

    def _shadow_dropped(self, event: events.ShadowDropped) -> None:
        self.sums.count((keys.SHADOW_DROPPED, event.kv_format, event.reason))
        self.sums.count((keys.SHADOW_SECONDS, event.kv_format), event.seconds)


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
    events.ShadowCompared: Tally._shadow_compared,
    events.ShadowDropped: Tally._shadow_dropped,
}
