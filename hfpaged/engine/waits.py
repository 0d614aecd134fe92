"""What requests wait for. The queue stands for one reason at a time, so one clock by reason serves all who wait; only
those who wait for a prefix that another one computes are passed by, and keep a time of their own.
"""

from __future__ import annotations

from typing import Literal

from hfpaged.clock import now

Cause = Literal["blocks", "seats", "budget", "prefix", "turn"]
Seconds = dict[str, float]  # by cause


class WaitClock:
    """How long the queue has stood, by cause; the reason is told at each step, and holds until the next one."""

    def __init__(self) -> None:
        self._totals: Seconds = {}
        self._cause: Cause | None = None
        self._since = now()
        self._passed_by: list[Waiting] = []  # since the last step, and
        self._found: list[Waiting] = []  # from this one on

    def tell(self, cause: Cause | None) -> None:
        """From now on the queue stands for this; None: it does not stand."""
        self._advance()
        self._cause = cause
        for waiting in self._passed_by:
            waiting.goes_on(self)
        self._passed_by, self._found = self._found, []
        for waiting in self._passed_by:
            waiting.is_passed_by(self)

    def await_prefix(self, waiting: Waiting) -> None:
        """From this step to the next one it waits for a prefix, whatever the queue stands for."""
        self._found.append(waiting)

    def since(self, mark: Seconds) -> Seconds:
        """Seconds by cause since it was `mark`, up to now."""
        self._advance()
        return minus(self._totals, mark)

    def _advance(self) -> None:
        time = now()
        if self._cause is not None:
            self._totals[self._cause] = self._totals.get(self._cause, 0.0) + time - self._since
        self._since = time


class Waiting:
    """One stay of a group in the queue, since `began`."""

    __slots__ = ("_beside", "_mark", "_passed_at", "_passed_since", "_prefix", "began")

    def __init__(self, began: float) -> None:
        self.began = began
        self._mark: Seconds = {}  # of the clock, when it came into the queue
        self._prefix = 0.0
        self._beside: Seconds = {}  # what the queue stood for meanwhile
        self._passed_since: float | None = None
        self._passed_at: Seconds = {}  # of the clock, then

    def begin(self, clock: WaitClock) -> None:
        """It is in the queue from now on; before that it was on its way there."""
        self._mark = clock.since({})

    @property
    def awaits_prefix(self) -> bool:
        """Whether it waits for what another group computes."""
        return self._passed_since is not None

    def is_passed_by(self, clock: WaitClock) -> None:
        """It waits for a prefix from now on."""
        self._passed_since, self._passed_at = now(), clock.since({})

    def goes_on(self, clock: WaitClock) -> None:
        """It does not any more, if it did."""
        if self._passed_since is not None:
            self._prefix += now() - self._passed_since
            self._beside = plus(self._beside, clock.since(self._passed_at))
            self._passed_since = None

    def end(self, clock: WaitClock) -> Seconds:
        """It is admitted, or given up; seconds by cause, in sum those since it began."""
        self.goes_on(clock)
        waits = plus(minus(clock.since(self._mark), self._beside), {"prefix": self._prefix})
        waits["turn"] = now() - self.began - sum(waits.values())
        return {cause: seconds for cause, seconds in waits.items() if seconds > 0}


def plus(first: Seconds, second: Seconds) -> Seconds:
    """Cause by cause."""
    return {cause: first.get(cause, 0.0) + second.get(cause, 0.0) for cause in first | second}


def minus(first: Seconds, second: Seconds) -> Seconds:
    """Cause by cause."""
    return {cause: seconds - second.get(cause, 0.0) for cause, seconds in first.items()}
