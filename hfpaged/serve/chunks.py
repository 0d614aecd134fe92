"""An answer in pieces: what chat and completions have in common of a stream.

For each token of each stream the event loop comes by here. What does not change is made into bytes once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from hfpaged.engine.call import Arrival, Call
from hfpaged.engine.delivery import StreamEvent
from hfpaged.engine.outputs import RequestOutput
from hfpaged.serve.event_stream import DONE
from hfpaged.serve.http_errors import ApiError, api_error
from hfpaged.serve.json_text import json_bytes
from hfpaged.serve.schemas.sampling import StreamOptions
from hfpaged.serve.usage import usage_of


class Chunks:
    """Whole events of one answer. `head` is what all of its chunks begin with; `n` sequences each request has.

    A subclass says in `choices` what is in a chunk's choices for what is new of one sequence.
    """

    def __init__(
        self, head: Mapping[str, Any], n: int, options: StreamOptions | None, *, counts_new: bool = True
    ) -> None:
        self._n, self._counts_new = n, counts_new
        self._with_usage = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and self._with_usage and bool(options.continuous_usage_stats)
        self._start = b"data: " + json_bytes(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        self._latest: dict[int, RequestOutput] = {}

    async def __call__(self, call: Call) -> AsyncGenerator[bytes]:
        """Raises ApiError where a request fails or is given up: what came before it has been sent."""
        async for arrival in call.arrivals():
            if self._with_usage:
                self._latest[arrival.index] = arrival.output
            if events := b"".join(self._events(arrival)):
                yield events
            if arrival.output.finished:
                check_ended(arrival.output)
        if self._with_usage:
            yield self._start + b"]" + self._usage() + b"}\n\n"
        yield DONE

    def choices(self, index: int, new: StreamEvent) -> Iterator[bytes]:
        """The choices of the chunks that tell what is new, each as JSON; `index` is the choice's own."""
        raise NotImplementedError

    def _events(self, arrival: Arrival) -> Iterator[bytes]:
        end = b"]" + self._usage() + b"}\n\n" if self._usage_always else self._end
        first = arrival.index * self._n
        for new in arrival.events:
            if new.finish_reason not in ("error", "abort"):
                for choice in self.choices(first + new.index, new):
                    yield self._start + choice + end

    def _usage(self) -> bytes:
        return b',"usage":' + json_bytes(usage_of(self._latest.values(), counts_new=self._counts_new))


def check_ended(output: RequestOutput) -> None:
    """Raises ApiError where a request failed or was given up, so that it is not taken for an answer."""
    if output.error is not None:
        raise api_error(output.error)
    if output.finish_reason == "abort":
        raise ApiError(503, "the server stops, and has given this request up; try it elsewhere", code="shutting_down")
