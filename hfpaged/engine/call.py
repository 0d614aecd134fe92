"""Some requests of a running engine that one coroutine awaits together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hfpaged.engine.arrivals import Arrivals
from hfpaged.engine.delivery import Deltas, StreamEvent
from hfpaged.engine.outputs import RequestOutput


class Submission(NamedTuple):
    """What `ContinuousBatcher.add_request` takes for one request: the prompt, and all else by name."""

    prompt: Any
    settings: Mapping[str, Any] = MappingProxyType({})


class Arrival(NamedTuple):
    """What has come of request `index` of a call: its latest output, and what is new in it by sequence."""

    index: int  # type: ignore[assignment]
    output: RequestOutput
    events: list[StreamEvent]


class Call:
    """Requests that were added together; `close` gives up those that have not ended."""

    def __init__(self, request_ids: Sequence[str], arrivals: Arrivals, abort: Callable[[str], object]) -> None:
        self.request_ids = tuple(request_ids)
        self._arrivals, self._abort = arrivals, abort
        self._deltas = [Deltas() for _ in request_ids]
        self._open = set(range(len(request_ids)))

    async def arrivals(self) -> AsyncIterator[Arrival]:
        """What comes until all have ended. Whoever reads slowly gets the tokens of several steps at once."""
        while self._open:
            for index, output in sorted((await self._arrivals.take()).items()):
                if output.finished:
                    self._open.discard(index)
                yield Arrival(index, output, self._deltas[index].of(output))

    async def last_outputs(self) -> list[RequestOutput]:
        """The last output of each request, in their order, when all have ended."""
        found: dict[int, RequestOutput] = {}
        async for arrival in self.arrivals():
            found[arrival.index] = arrival.output
        return [found[index] for index in range(len(self.request_ids))]

    def close(self) -> None:
        """Abort what is still under way; later calls do nothing."""
        for index in self._open:  # the name of one that has ended may be another request's by now
            self._abort(self.request_ids[index])
        self._open = set()
