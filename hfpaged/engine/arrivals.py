"""How outputs come from the engine's thread into an event loop: one call over the border for each step, not for each
request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from hfpaged.engine.outputs import RequestOutput


class Doorbell:
    """Of one event loop: the first of those who ring in a step wakes it, the others are seen to with it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._rung: list[Callable[[], None]] = []

    def ring(self, answer: Callable[[], None]) -> None:
        """Let the loop call `answer`. From any thread; nothing happens where the loop has been closed."""
        with self._lock:
            self._rung.append(answer)
            is_first = len(self._rung) == 1
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # nobody is there to be told
                self._answer_nobody()

    def _answer(self) -> None:
        with self._lock:
            rung, self._rung = self._rung, []
        for answer in rung:
            answer()

    def _answer_nobody(self) -> None:
        with self._lock:
            self._rung = []


class Arrivals:
    """Outputs of some requests, for one coroutine. Each output holds all that was before it, so that of each request
    only the latest is kept: who reads slowly gets more at once, and nothing piles up.
    """

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._latest: dict[int, RequestOutput] = {}
        self._came = asyncio.Event()

    def put(self, index: int, output: RequestOutput) -> None:
        """From the engine's thread: the latest of request `index`."""
        with self._lock:
            is_first = not self._latest
            self._latest[index] = output
        if is_first:
            self._doorbell.ring(self._came.set)

    async def take(self) -> dict[int, RequestOutput]:
        """By request, the latest output of each that has one which was not taken; waits until there is one."""
        while True:
            await self._came.wait()
            self._came.clear()
            with self._lock:
                taken, self._latest = self._latest, {}
            if taken:
                return taken
