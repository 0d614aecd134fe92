"""Watches over steps that do not come back: a thread cannot be stopped, but it can be told of."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from hfpaged.engine.core import Engine
from hfpaged.engine.events import StepStuck

logger = logging.getLogger("hfpaged")


class Watchdog:
    """Says once, in the log and as an event, when a step takes longer than `limit` seconds. `thread_id`: who makes the
    steps, so that the log shows where he is.
    """

    def __init__(self, engine: Engine, limit: float, thread_id: Callable[[], int | None]) -> None:
        self._engine, self._limit, self._thread_id = engine, limit, thread_id
        self._done = threading.Event()
        self._told = -1
        self._thread = threading.Thread(target=self._watch, name="hfpaged-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    @property
    def is_stuck(self) -> bool:
        """Whether the step under way is over its time."""
        return self._seconds() > self._limit

    def _watch(self) -> None:
        while not self._done.wait(min(self._limit / 4, 1.0)):
            number, seconds = self._engine.num_steps, self._seconds()
            if seconds > self._limit and number != self._told:
                self._told = number
                logger.error("step %d has not come back for %.1f s; it is at\n%s", number, seconds, self._where())
                self._engine.tells.emit(StepStuck(number=number, seconds=seconds))

    def _seconds(self) -> float:
        began = self._engine.step_began
        return 0.0 if began is None else time.perf_counter() - began

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread_id() or -1)
        return "".join(traceback.format_stack(frame)) if frame else "(the thread is gone)"
