"""The engine in a thread of its own: for servers, and for everyone who awaits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from hfpaged.engine.delivery import Deltas, StreamEvent
from hfpaged.engine.outputs import RequestOutput
from hfpaged.errors import BatcherClosedError

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher

logger = logging.getLogger("hfpaged")


class RunningEngine:
    """Between entering and leaving, a thread makes the steps. On leaving requests that are still there are aborted."""

    def __init__(self, batcher: ContinuousBatcher) -> None:
        self.batcher = batcher
        self._thread: threading.Thread | None = None
        self._stops = False

    @property
    def is_alive(self) -> bool:
        """Whether steps are made."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> RunningEngine:
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="hfpaged-engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stops = True
        self.batcher.wake()
        assert self._thread is not None
        self._thread.join()
        self.batcher.abort_all()

    async def __aenter__(self) -> RunningEngine:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.__exit__, *error)

    async def stream(self, prompt: Any, generation_config: Any = None, **settings: Any) -> AsyncIterator[StreamEvent]:
        """What is new of one request as soon as it is. Leaving the loop, or cancelling, aborts it. Arguments and errors
        of `ContinuousBatcher.add_request`.
        """
        async for _, events in self._outputs(prompt, generation_config, settings):
            for event in events:
                yield event

    async def generate(self, prompt: Any, generation_config: Any = None, **settings: Any) -> RequestOutput:
        """One request to its end."""
        async for output, _ in self._outputs(prompt, generation_config, settings):
            if output.finished:
                return output
        raise AssertionError("an engine's last output is a finished one")

    async def _outputs(
        self, prompt: Any, generation_config: Any, settings: dict[str, Any]
    ) -> AsyncIterator[tuple[RequestOutput, list[StreamEvent]]]:
        if not self.is_alive:
            raise BatcherClosedError("the engine is not running; use it inside of `async with batcher.running()`")
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RequestOutput] = asyncio.Queue()
        deltas = Deltas()

        def tell(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, output)

        request_id = await asyncio.to_thread(
            self.batcher.add_request, prompt, generation_config, listener=tell, **settings
        )
        try:
            while True:
                output = await queue.get()
                yield output, deltas.of(output)
                if output.finished:
                    return
        finally:
            self.batcher.abort(request_id)

    def _run(self) -> None:
        with self.batcher.driving():
            while not self._stops:
                if self.batcher.has_work:
                    self.batcher.step()
                else:
                    self.batcher.wait_for_work(0.5)
