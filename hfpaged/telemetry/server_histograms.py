"""The histograms of OpenTelemetry's conventions for servers of generative AI, of requests and calls of generate().

Times to the first token and per token are those of responses that came to no error, as the conventions want it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import context as otel
from opentelemetry.metrics import Histogram, Meter

from hfpaged import generation_events
from hfpaged.engine import buckets, events
from hfpaged.telemetry import conventions as names
from hfpaged.telemetry.span_options import options_in

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher


class ServerHistograms:
    """Of one meter."""

    def __init__(self, meter: Meter) -> None:
        self._duration = _histogram(meter, names.REQUEST_DURATION, "Duration of requests.", buckets.DURATION)
        self._first_token = _histogram(
            meter, names.TIME_TO_FIRST_TOKEN, "Time to the first token of responses.", buckets.FIRST_TOKEN
        )  # fmt: skip
        self._per_token = _histogram(
            meter, names.TIME_PER_OUTPUT_TOKEN, "Time per token behind the first of responses.", buckets.PER_TOKEN
        )  # fmt: skip

    def hook_for(self, batcher: ContinuousBatcher) -> RequestHook:
        """What records the requests of a batcher."""
        return RequestHook(self, batcher.tally.model_name)

    def generate_hook(self, event: generation_events.GenerationEvent) -> None:
        """Record a call of generate()."""
        if not isinstance(event, generation_events.GenerationEnded):
            return
        began, first, tokens = event.call.began, event.first_token_time, event.forwards
        operation = options_in(otel.get_current()).operation
        self.record(event.call.model_name, operation, (began, first, event.time), tokens, event.error)

    def record(
        self, model: str, operation: str, times: tuple[float, float | None, float], tokens: int,
        error: BaseException | None,
    ) -> None:  # fmt: skip
        """`times` of the beginning, the first token and the end; `tokens` came one after the other."""
        began, first, end = times
        attributes = {
            names.OPERATION_NAME: operation, names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: model, names.RESPONSE_MODEL: model,
        }  # fmt: skip
        if error is not None:
            self._duration.record(end - began, attributes | {names.ERROR_TYPE: names.error_type(error)})
            return
        self._duration.record(end - began, attributes)
        if first is not None:
            self._first_token.record(first - began, attributes)
            if tokens > 1:
                self._per_token.record((end - first) / (tokens - 1), attributes)


class RequestHook:
    """Records the requests of one batcher when they end."""

    def __init__(self, histograms: ServerHistograms, model_name: str) -> None:
        self._histograms, self._model_name = histograms, model_name
        self._operations: dict[str, str] = {}  # of those in flight that are no text completions

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Arrived):
            operation = options_in(event.context.run(otel.get_current)).operation
            if operation != names.TEXT_COMPLETION:
                self._operations[event.request_id] = operation
        elif isinstance(event, events.Ended):
            metrics, tokens = event.metrics, max(event.sequence_tokens, default=0)
            operation = self._operations.pop(event.request_id, names.TEXT_COMPLETION)
            end = event.time if metrics.finished_time is None else metrics.finished_time
            error = event.error if isinstance(event, events.Failed) else None
            times = (metrics.arrival_time, metrics.first_token_time, end)
            self._histograms.record(self._model_name, operation, times, tokens, error)


def _histogram(meter: Meter, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
    return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)
