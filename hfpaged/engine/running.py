"""The engine in a thread of its own: for servers, and for everyone who awaits."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from hfpaged.engine.arrivals import Arrivals, Doorbell
from hfpaged.engine.call import Call, Submission
from hfpaged.engine.delivery import StreamEvent
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
        self._doorbells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Doorbell] = weakref.WeakKeyDictionary()

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
        """What is new of one request as soon as it is; who reads slowly gets more at once. Leaving the loop, or
        cancelling, aborts it. Arguments and errors of `ContinuousBatcher.add_request`.
        """
        call = await self.begin_one(prompt, generation_config, **settings)
        try:
            async for arrival in call.arrivals():
                for event in arrival.events:
                    yield event
        finally:
            call.close()

    async def generate(self, prompt: Any, generation_config: Any = None, **settings: Any) -> RequestOutput:
        """One request to its end."""
        call = await self.begin_one(prompt, generation_config, **settings)
        try:
            return (await call.last_outputs())[0]
        finally:
            call.close()

    async def begin_one(self, prompt: Any, generation_config: Any = None, **settings: Any) -> Call:
        """One request, see `begin`."""
        return await self.begin(lambda: [Submission(prompt, {"generation_config": generation_config, **settings})])

    async def begin(self, prepare: Callable[[], Iterable[Submission]]) -> Call:
        """Add requests: all of them, or none where one is refused. Whoever gets the call closes it.

        `prepare` says which. It runs in a thread, as does the reading of prompts, so that the event loop goes on.
        Raises what `prepare` and `ContinuousBatcher.add_request` raise, and BatcherClosedError.
        """
        if not self.is_alive:
            raise BatcherClosedError("the engine is not running; use it inside of `async with batcher.running()`")
        arrivals = Arrivals(self._doorbell())
        is_gone = threading.Event()
        adding = asyncio.ensure_future(asyncio.to_thread(self._add_all, prepare, arrivals, is_gone))
        try:
            call = await asyncio.shield(adding)
        except asyncio.CancelledError:  # its client was gone before the requests were there
            is_gone.set()
            adding.add_done_callback(_close_what_came)
            raise
        if not self.is_alive:  # it has stopped meanwhile, and nobody else would end these requests
            await asyncio.to_thread(self._loop.end_all)
        return call

    def _add_all(
        self, prepare: Callable[[], Iterable[Submission]], arrivals: Arrivals, is_gone: threading.Event
    ) -> Call:
        request_ids: list[str] = []
        try:
            for index, (prompt, settings) in enumerate(prepare()):
                if is_gone.is_set():  # a long list is read for long
                    break
                listener = partial(arrivals.put, index)
                request_ids.append(self.batcher.add_request(prompt, listener=listener, **settings))
        except BaseException:
            for request_id in request_ids:
                self._loop.abort(request_id)
            raise
        return Call(request_ids, arrivals, self._loop.abort)

    def _doorbell(self) -> Doorbell:
        loop = asyncio.get_running_loop()
        if loop not in self._doorbells:
            self._doorbells[loop] = Doorbell(loop)
        return self._doorbells[loop]

    def _run(self) -> None:
        try:
            with self._loop.driving():
                while not self._stops:
                    if self._loop.has_work:
                        self._step()
                    elif not self._loop.work_spare():
                        self._loop.wait_for_work(0.5)
        finally:
            if (
                not self._stops
            ):  # a hook or a processor has ended this thread, SystemExit say: nobody shall wait for ever
                self._loop.end_all(BatcherClosedError("the engine's thread has ended; its log says why"))

    def _step(self) -> None:
        """An error here is one of ours, as those of models and requests fail requests: nobody shall wait for ever."""
        try:
            self._loop.step()
        except Exception as error:
            logger.exception("a step failed in the engine itself; all requests fail")
            self._loop.end_all(error)


def _close_what_came(adding: asyncio.Future[Call]) -> None:
    if not adding.cancelled() and adding.exception() is None:
        adding.result().close()
