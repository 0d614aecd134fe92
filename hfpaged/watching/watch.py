"""`hfpaged.watch`: a thread that looks and draws, and never gets in the way."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hfpaged.cache import PagedCache
from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_pool import KVPool
from hfpaged.watching.screen import Screen, screen_for
from hfpaged.watching.source import PoolSource, source_of
from hfpaged.watching.tracker import Figures, Tracker

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("hfpaged")

# The most seconds that stopping waits for a look that is under way.
PATIENCE = 2.0


class Watch:
    """Goes on until `stop`, or until all that it watches is closed or gone, which it does not prevent."""

    def __init__(
        self, trackers: Sequence[Tracker], screen: Screen, interval: float, clock: Callable[[], float]
    ) -> None:
        self._trackers, self._screen, self._interval, self._clock = trackers, screen, interval, clock
        self._stopping = threading.Event()
        self._ending = threading.Lock()
        self._has_ended = False
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether it still draws."""
        return not self._has_ended

    @property
    def figures(self) -> list[Figures]:
        """What was seen last, of each thing."""
        return [tracker.figures for tracker in self._trackers]

    def start(self) -> Watch:
        """Look and draw from now on, in a thread of its own."""
        atexit.register(self.stop)  # a terminal must get its cursor back
        self._thread = threading.Thread(target=self._run, name="hfpaged-watch", daemon=True)
        self._thread.start()
        return self

    def look(self) -> bool:
        """Look once and draw; whether there is anything left to look at. An error ends the watch and nothing else."""
        try:
            for tracker in self._trackers:
                if not tracker.is_over:
                    tracker.look(self._clock())
            self._screen.show(self.figures)
        except Exception:
            logger.exception("a watch failed and has ended; what it watched goes on")
            return False
        return not all(tracker.is_over for tracker in self._trackers)

    def stop(self) -> None:
        """Draw no more, and leave a line with what it came to."""
        self._stopping.set()
        thread = self._thread
        try:
            if thread is not None and thread is not threading.current_thread():
                thread.join(PATIENCE)
        finally:  # Ctrl-C once more
            self._end(may_look=thread is None or not thread.is_alive())

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            if not self.look():
                self._end(may_look=False)
                return

    def _end(self, *, may_look: bool) -> None:
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
        if may_look:
            self.look()
        atexit.unregister(self.stop)
        for tracker in self._trackers:
            tracker.source.close()
        try:
            self._screen.finish(self.figures)
        except Exception:
            logger.exception("a watch could not show its end")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        names = ", ".join(tracker.name for tracker in self._trackers)
        return f"Watch({names}, {'running' if self.is_running else 'stopped'})"


def watch(
    *watched: PagedCache | ContinuousBatcher | KVPool, interval: float = 0.5, console: Console | None = None
) -> Watch:
    """Show what caches, batchers and pools do, live: a line on a terminal or in a notebook, a table for several; where
    output is no terminal a line now and then, and in the end one with totals.

        with hfpaged.watch(batcher):
            batcher.generate(prompts)

        w = hfpaged.watch(cache)
        ...
        w.stop()

    It draws blocks of the pool that are used (█) and that keep a prefix nobody uses (▒), how many prompt tokens were
    found as prefixes, tokens a second, and of a batcher its requests. A cache stands for its pool: what others do there
    is counted with it. The peak is that of the looks, and of a batcher also that of the ends of its steps.

    Args:
        watched: they may be dropped or closed meanwhile, which ends the watch.
        interval: seconds between two looks.
        console: a console of rich, to draw there.

    Raises InvalidConfigError for what cannot be watched; from then on no error of its own reaches its user.
    """
    if not watched:
        raise InvalidConfigError("watch() was given nothing; give a PagedCache, a ContinuousBatcher or a KVPool")
    if not (isinstance(interval, (int, float)) and 0 < interval <= threading.TIMEOUT_MAX):  # inf ended its thread
        raise InvalidConfigError(
            f"interval={interval!r}: a watch looks every so many seconds; use a number above 0, 0.5 say"
        )
    return make_watch([source_of(each) for each in watched], interval, console, time.monotonic).start()


def make_watch(
    sources: Sequence[PoolSource], interval: float, console: Console | None, clock: Callable[[], float]
) -> Watch:
    """One whose thread has not begun."""
    kinds = Counter(source.kind for source in sources)
    numbers = Counter[str]()
    trackers = []
    for source in sources:
        numbers[source.kind] += 1
        name = source.kind if kinds[source.kind] == 1 else f"{source.kind} {numbers[source.kind]}"
        trackers.append(Tracker(source, name, clock()))
    return Watch(trackers, screen_for(console, [tracker.figures for tracker in trackers]), interval, clock)
