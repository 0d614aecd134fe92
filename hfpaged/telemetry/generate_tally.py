"""What calls of generate() with a PagedCache count, while somebody watches."""

from __future__ import annotations

import threading

from hfpaged import generation_events
from hfpaged.engine import buckets
from hfpaged.engine.sums import Sums
from hfpaged.engine.tally_keys import LOOKUPS, label
from hfpaged.generation_events import GenerationBegan, GenerationCall, GenerationEnded, GenerationPrefilled
from hfpaged.telemetry.readings import Readings

CALLS = "hfpaged_generate_calls_total"
TOKENS = "hfpaged_generate_tokens_total"
RUNNING = ("hfpaged_generate_running",)
DURATION = ("hfpaged_generate_duration_seconds",)
FIRST_TOKEN = ("hfpaged_generate_time_to_first_token_seconds",)


class GenerateTally:
    """A hook that counts, in any thread. It watches from the first `watch` to the last `unwatch`, and keeps what it has
    counted: a counter does not go back because somebody looked away.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers = 0
        self._models: dict[str, Sums] = {}
        self._calls: dict[GenerationCall, int] = {}  # under way: tokens of the prompt that were found

    def watch(self) -> None:
        """Somebody will read."""
        with self._lock:
            self._watchers += 1
            is_first = self._watchers == 1
        if is_first:
            generation_events.watch(self)

    def unwatch(self) -> None:
        """Undo one `watch`."""
        with self._lock:
            self._watchers -= 1
            is_last = self._watchers == 0
        if is_last:
            generation_events.unwatch(self)
            with self._lock:
                self._calls = {}  # their ends will not be told

    def read(self, readings: Readings) -> None:
        """Add what was counted."""
        with self._lock:
            for name, sums in self._models.items():
                readings.of(name).add(sums)
                running = sum(call.model_name == name for call in self._calls)
                readings.of(name).numbers[RUNNING] = running

    def __call__(self, event: generation_events.GenerationEvent) -> None:
        with self._lock:
            if isinstance(event, GenerationBegan):
                self._calls[event.call] = 0
                self._sums(event.call)
            elif event.call not in self._calls:  # it began before anybody watched
                return
            elif isinstance(event, GenerationPrefilled):
                self._calls[event.call] = event.hit
                for reason in event.reasons:
                    self._sums(event.call).count((LOOKUPS, label(reason)))
            elif isinstance(event, GenerationEnded):
                self._ended(event, self._calls.pop(event.call))

    def _ended(self, event: GenerationEnded, cached: int) -> None:
        call, sums = event.call, self._sums(event.call)
        sums.count((CALLS, "finished" if event.error is None else "error"))
        for kind, tokens in (("prompt", call.prompt_tokens), ("cached", cached), ("output", event.output_tokens)):
            sums.count((TOKENS, kind), tokens)
        sums.histograms[DURATION].observe(event.time - call.began)
        if event.first_token_time is not None:
            sums.histograms[FIRST_TOKEN].observe(event.first_token_time - call.began)

    def _sums(self, call: GenerationCall) -> Sums:
        sums = self._models.get(call.model_name)
        if sums is None:
            sums = self._models[call.model_name] = Sums()
            sums.name(CALLS, ("finished", "error"))
            sums.name(TOKENS, ("prompt", "cached", "output"))
            sums.histogram(DURATION, buckets.DURATION)
            sums.histogram(FIRST_TOKEN, buckets.FIRST_TOKEN)
        return sums


# One for the process: the calls of a model are counted once, however many read them.
GENERATE = GenerateTally()
