"""The engine in a thread of its own: for servers, and for everyone who awaits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from hfpaged.engine.delivery import Deltas, StreamEvent
from hfpaged.engine.outputs import RequestOutput
from hfpaged.engine.watchdog import Watchdog
from hfpaged.errors import BatcherClosedError, InvalidConfigError

if TYPE_CHECKING:
    from hfpaged.engine.batcher import ContinuousBatcher

logger = logging.getLogger("hfpaged")


class RunningEngine:
    """Between entering and leaving, a thread makes the steps. On leaving requests that are still there are aborted."""

    def __init__(self, batcher: ContinuousBatcher, step_timeout: float | None = None) -> None:
        self.batcher, self._loop = batcher, batcher.loop
        self._thread: threading.Thread | None = None
        self._stops = False
        self._step_timeout = step_timeout
        self._watchdog: Watchdog | None = None

    @property
    def is_alive(self) -> bool:
        """Whether steps are made."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_healthy(self) -> bool:
        """Whether steps are made, and the one under way is within its time."""
        return self.is_alive and not (self._watchdog and self._watchdog.is_stuck)

    def __enter__(self) -> RunningEngine:
        if not self._loop.claim():
            raise InvalidConfigError("the steps of this batcher are made by a thread already; use that running engine")
        self._stops = False
        thread = self._thread = threading.Thread(target=self._run, name="hfpaged-engine", daemon=True)
        thread.start()
        if self._step_timeout is not None:
            self._watchdog = Watchdog(self._loop.engine, self._step_timeout, lambda: thread.ident)
        return self

    def __exit__(self, *error: object) -> None:
        self._stops = True
        self._loop.wake()
        assert self._thread is not None
        self._thread.join()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._loop.unclaim()
        self._loop.end_all()

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

        adding = asyncio.ensure_future(
            asyncio.to_thread(self.batcher.add_request, prompt, generation_config, listener=tell, **settings)
        )
        try:
            request_id = await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(self._give_up)
            raise
        if not self.is_alive:  # it has stopped meanwhile, and nobody else would end this request
            await asyncio.to_thread(self._loop.end_all)
        is_over = False
        try:
            while not is_over:
                output = await queue.get()
                is_over = output.finished
                yield output, deltas.of(output)
        finally:
            if not is_over:  # later the name may be another request's
                self._loop.abort(request_id)

    def _give_up(self, adding: asyncio.Future[str]) -> None:
        """Its client was gone before the request was there."""
        if not adding.cancelled() and adding.exception() is None:
            self._loop.abort(adding.result())

    def _run(self) -> None:
        with self._loop.driving():
            while not self._stops:
                if self._loop.has_work:
                    self._step()
                else:
                    self._loop.wait_for_work(0.5)

    def _step(self) -> None:
        """An error here is one of ours, as those of models and requests fail requests: nobody shall wait for ever."""
        try:
            self._loop.step()
        except Exception as error:
            logger.exception("a step failed in the engine itself; all requests fail")
            self._loop.end_all(error)
