"""The end of an application: by a signal, or because somebody else has ended it."""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from hfpaged.errors import HfpagedError
from hfpaged.replicas.deployment import REPLICA

logger = logging.getLogger("hfpaged")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_SECONDS = 5.0  # from one look whether the application is there to the next
WAIT_SECONDS = 0.1
DELETING_SECONDS = 8.0
LAST_SECONDS = 10.0  # beyond the time that requests get


class LostApplicationError(HfpagedError):
    """The application is gone from the cluster, or the cluster is."""


class Ending:
    """Entered, signals to stop are counted. The first one while nothing waits for it interrupts, as Ctrl-C does."""

    def __init__(self) -> None:
        self._signals = 0
        self._is_waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        self.take_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_signals(self) -> None:
        """Again, where a library has taken them since: Ray does as it starts."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._note)

    def wait(self, app_name: str, replicas: Any, shutdown_timeout: float) -> None:
        """Until a signal comes; then until all requests are answered, or their time is over, or another signal comes.
        Raises LostApplicationError.
        """
        self._is_waiting = True
        pause, seen, next_look = threading.Event(), "", time.monotonic()
        while not self._signals:
            if time.monotonic() >= next_look:
                seen, next_look = _look(app_name, seen), time.monotonic() + LOOK_SECONDS
            pause.wait(WAIT_SECONDS)
        self._drain(replicas, shutdown_timeout + LAST_SECONDS)

    def _drain(self, replicas: Any, seconds: float) -> None:
        draining = threading.Thread(target=_tell_all, args=(replicas, "drain", seconds), daemon=True)
        draining.start()
        is_hurried = False
        while draining.is_alive():
            draining.join(WAIT_SECONDS)
            if self._signals > 1 and not is_hurried:
                is_hurried = True
                _tell_all(replicas, "hurry", LAST_SECONDS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if not self._is_waiting:
            raise KeyboardInterrupt


def delete(app_name: str) -> None:
    """Take an application whose requests have ended from its cluster. Ray Serve does it, and is waited for as long as
    replicas take to close: one that finds no place and was never started takes as long as its requests would get.
    """
    serve.delete(app_name, _blocking=False)
    end = time.monotonic() + DELETING_SECONDS
    while app_name in serve.status().applications and time.monotonic() < end:
        time.sleep(WAIT_SECONDS)


def _tell_all(replicas: Any, method: str, seconds: float) -> None:
    """Call it in each replica, and wait until all of them have returned. Those that are lost have nothing to end."""
    with suppress(RayError, RayServeException, TimeoutError):
        replicas.broadcast(method).results(timeout_s=seconds, return_exceptions=True)


def _look(app_name: str, seen: str) -> str:
    """Which replicas there are, and said in the log where that is not what was seen before. Raises
    LostApplicationError.
    """
    try:
        told = serve.status().applications.get(app_name)
    except (RayError, RayServeException) as error:
        raise LostApplicationError(f"the Ray cluster is lost: {error}; start it and this again") from error
    if told is None or REPLICA not in told.deployments:
        raise LostApplicationError(
            f"somebody has deleted the application {app_name!r} from the cluster; start it again"
        )
    states = told.deployments[REPLICA].replica_states
    now = ", ".join(f"{states[state]} {state.lower()}" for state in sorted(states)) or "none"
    if now != seen:
        logger.info("replicas: %s", now)
    return now
