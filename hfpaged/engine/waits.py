"""What requests wait for. The queue stands for one reason at a time, so one clock by reason serves all who wait."""

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

    def tell(self, cause: Cause | None) -> None:
        """From now on the queue stands for this; None: it does not stand."""
        time = now()
        if self._cause is not None:
            self._totals[self._cause] = self._totals.get(self._cause, 0.0) + time - self._since
        self._cause, self._since = cause, time

    def since(self, mark: Seconds) -> Seconds:
        """Seconds by cause since it was `mark`, up to now."""
        self.tell(self._cause)
        return {cause: total - mark.get(cause, 0.0) for cause, total in self._totals.items()}


class Waiting:
    """One stay of a group in the queue, since `began`."""

    __slots__ = ("_awaits_since", "_before", "_mark", "began")

    def __init__(self, began: float) -> None:
        self.began = began
        self._mark: Seconds = {}
        self._before: Seconds = {}
        self._awaits_since: float | None = None

    def begin(self, clock: WaitClock) -> None:
        """It is in the queue from now on; before that it was on its way there."""
        self._mark = clock.since({})

    @property
    def awaits_prefix(self) -> bool:
        """Whether it waits for what another group computes."""
        return self._awaits_since is not None

    def await_prefix(self, clock: WaitClock) -> None:
        """From now on it waits for a prefix that another group computes, whatever the queue stands for."""
        if self._awaits_since is None:
            self._before, self._awaits_since = clock.since(self._mark), now()

    def end(self, clock: WaitClock) -> Seconds:
        """It is admitted, or given up; seconds by cause, in sum those since it began."""
        time = now()
        waits = clock.since(self._mark) if self._awaits_since is None else dict(self._before)
        if self._awaits_since is not None:
            waits["prefix"] = time - self._awaits_since
        waits["turn"] = max(time - self.began - sum(waits.values()), 0.0)
        return {cause: seconds for cause, seconds in waits.items() if seconds > 0}
