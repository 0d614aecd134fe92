"""The spans of one request of a batcher.

    request   |--------------------------------------------------------------|
    queue     |---|                             |----|
    prefill       |---||---|                         |---|
    decode                 |--------------------|        |-------------------|
                           first_token          preempted

A request of several samples is one in the queue and in the first prefill, and then as many, each of which may be
preempted alone: its `decode` goes on from the first token to the end, and what is computed again lies beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from hfpaged.engine import events as ev
from hfpaged.telemetry import conventions as names
from hfpaged.telemetry import span_attributes
from hfpaged.telemetry.spans import Origins, add_span, nanoseconds, set_error


class Chunk(NamedTuple):
    """Tokens that one step computed, of all sequences of the request."""

    number: int
    began: float
    ended: float
    start: int
    tokens: int


class RequestTrace:
    """From its arrival to its end; told of its events in order. `context` is that of its span."""

    __slots__ = (
        "_admitted", "_chunk", "_decode_began", "_has_beams", "_has_token", "_is_split", "_is_whole", "_origins",
        "_prompt", "_stays", "_tokens", "_tracer", "_waits", "context", "span",
    )  # fmt: skip

    def __init__(self, tracer: Tracer, span: Span, parent: Context, origins: Origins, event: ev.Arrived) -> None:
        self.span, self.context = span, set_span_in_context(span, parent)
        self._tracer, self._origins = tracer, origins
        params = event.params
        self._is_split = params.num_beams == 1 and params.num_sequences > 1
        self._prompt, self._has_beams = event.prompt_tokens, params.num_beams > 1
        self._stays = [event.time]  # in the queue, when each began
        self._waits: dict[str, float] = {}  # told of stays that are over
        self._admitted = event.time
        self._chunk: Chunk | None = None
        self._has_token = self._is_whole = False  # its prompt, in chunks
        self._decode_began: float | None = None
        self._tokens = 0  # that it had when this stay in the batch began

    def admitted(self, event: ev.Admitted) -> None:
        """A stay in the queue is over: the one that began when it says, as several may be under way."""
        began = min(self._stays, key=lambda stay: abs(event.time - event.queue_time - stay), default=event.time)
        if self._stays:
            self._stays.remove(began)
        for cause, seconds in event.waits.items():
            self._waits[cause] = self._waits.get(cause, 0.0) + seconds
        self._add_queue(began, event.time, event.waits, event.again)
        self._admitted = event.time

    def matched(self, event: ev.PrefixMatched) -> None:
        """Its prompt was looked up."""
        self.span.set_attributes(span_attributes.of_match(event, event.reason))
        if event.waited_for is not None:
            self.span.set_attribute(names.PREFIX_WAITED_FOR, event.waited_for)
        self._origins.link(self.span, event.computed_by)

    def prefilled(self, event: ev.Prefilled) -> None:
        """A step computed tokens of it, perhaps of several of its sequences."""
        chunk = self._chunk
        if chunk is not None and chunk.number == event.number:
            start, tokens = min(chunk.start, event.start), chunk.tokens + event.tokens
            self._chunk = chunk._replace(ended=event.time, start=start, tokens=tokens)
        else:
            self._add_chunk()
            began = max(event.began, self._admitted)  # it was admitted in this step
            self._chunk = Chunk(event.number, began, event.time, event.start, event.tokens)

    def first_token(self, event: ev.FirstToken) -> None:
        """From now on it decodes."""
        self._add_chunk()
        self._has_token = True
        if self._is_whole:  # else the last token of the prompt was decoded
            self._decode_began = event.time
        self.span.add_event(names.FIRST_TOKEN_EVENT, timestamp=nanoseconds(event.time))

    def preempted(self, event: ev.Preempted) -> None:
        """It is in the queue again, or one of its samples is."""
        self._add_chunk()
        if not self._is_split:
            self._add_decode(event.time, event.output_tokens)
            self._decode_began, self._tokens = None, event.output_tokens
        self._stays.append(event.time)
        attributes = {names.LOST_TOKENS: event.lost, names.USAGE_OUTPUT_TOKENS: event.output_tokens}
        self.span.add_event(names.PREEMPTED_EVENT, attributes, nanoseconds(event.time))

    def ended(self, event: ev.Ended) -> None:
        """Its one end. The span ends whatever happens here."""
        try:
            self._add_chunk()
            self._add_decode(event.time, event.output_tokens)
            self._leave_queue(event)
            self._say_end(event)
        finally:
            self.span.end(nanoseconds(event.time))

    def abandon(self) -> None:
        """Nobody will tell of its end."""
        self.span.end()

    def _add_queue(self, began: float, ended: float, waits: Mapping[str, float], again: bool) -> None:
        attributes = span_attributes.of_waits(waits) | {names.AGAIN: again}
        add_span(self._tracer, names.QUEUE_SPAN, self.context, began, ended, attributes)

    def _add_chunk(self) -> None:
        """The step of this chunk is over. If it was the last one, decoding goes on from there."""
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            return
        attributes: span_attributes.Attributes = {
            names.TOKENS: chunk.tokens, names.START_POSITION: chunk.start, names.STEP: chunk.number,
        }  # fmt: skip
        add_span(self._tracer, names.PREFILL_SPAN, self.context, chunk.began, chunk.ended, attributes)
        if not self._has_token:
            self._is_whole = chunk.start + chunk.tokens >= self._prompt
        if not (self._has_token and self._is_split):
            self._decode_began = chunk.ended

    def _add_decode(self, time: float, tokens: int) -> None:
        """A stay in the batch is over, if it was one that brought tokens; it has so many by now."""
        began, count = self._decode_began, tokens - self._tokens
        if began is None and count:  # Ctrl-C came before any of its prompt was told of as computed
            began = self._admitted
        if began is None or not self._has_token:
            return
        if count or self._has_beams:  # whose tokens count when they have ended
            attributes: span_attributes.Attributes = {names.TOKENS: count} if count else {}
            add_span(self._tracer, names.DECODE_SPAN, self.context, began, time, attributes)

    def _leave_queue(self, event: ev.Ended) -> None:
        """It ended where it waited."""
        waits = {cause: total - self._waits.get(cause, 0.0) for cause, total in event.metrics.waits.items()}
        waits = {cause: seconds for cause, seconds in waits.items() if seconds > 1e-9}
        for began in self._stays:
            own = waits if len(self._stays) == 1 else {}
            self._add_queue(began, event.time, own, event.metrics.admitted_time is not None)

    def _say_end(self, event: ev.Ended) -> None:
        found = span_attributes.of_metrics(event.metrics)
        found[names.USAGE_OUTPUT_TOKENS] = event.output_tokens
        reason: str = event.finish_reason if isinstance(event, ev.Finished) else "abort"
        if isinstance(event, ev.Failed):
            set_error(self.span, event.error, event.time)
            reason = "error"
        found[names.RESPONSE_FINISH_REASONS] = [reason]
        self.span.set_attributes(found)
