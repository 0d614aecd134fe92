"""The knee: how much faster requests may come until the queue takes off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hfpaged.planner.outcome import Outcome
from hfpaged.planner.variant import Variant

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
FINER = (0.2, 0.4, 0.6, 0.8)  # between two of them, on the scale of powers
REQUESTS = 5000  # of the trace, the first ones: enough to fill a queue
# A queue has taken off where requests wait for so large a part of the time that they are served for, or so many of
# them find it full.
WAIT, REFUSED = 0.5, 0.01


@dataclass(frozen=True)
class Knee:
    """`fine` is the largest rate that was tried at which the queue stays short, `off` the smallest at which it does
    not, as multiples of the trace's own; None where none of those was tried. `tried`: all, by rate.
    """

    fine: float | None
    off: float | None
    requests_per_second: float
    tried: tuple[Outcome, ...]

    def __str__(self) -> str:
        if self.fine is None and self.off is None:
            return "the knee was not looked for to its end"
        if self.off is None:
            return f"the queue stays short up to {self.fine:g} times the rate of the trace, the most that was tried"
        if self.fine is None:
            return f"the queue has taken off at {self.off:.3g} times the rate of the trace, the least that was tried"
        return (
            f"the queue takes off between {self.fine:.3g} and {self.off:.3g} times the rate of the trace "
            f"({self.fine * self.requests_per_second:.3g} and {self.off * self.requests_per_second:.3g} requests/s)"
        )


def takes_off(outcome: Outcome) -> bool:
    """Whether requests wait long for being served, or are refused."""
    if outcome.refused > REFUSED * outcome.requests:
        return True
    queue, duration = outcome.queue.mean, outcome.duration.mean
    return queue is not None and duration is not None and queue > WAIT * (duration - queue)


def serves(outcome: Outcome) -> bool:
    """Whether nearly all requests have room in the pool at all, and none of them waits long."""
    return outcome.too_long <= REFUSED * outcome.requests and not takes_off(outcome)


def find_knee(
    variant: Variant, requests_per_second: float, run: Callable[[Sequence[Variant]], list[Outcome]]
) -> Knee:  # fmt: skip
    """Try rates in two rounds; `run` gives the outcomes of variants in order, or fewer where it was interrupted."""
    tried = run([variant.with_rate(rate) for rate in RATES])
    fine, off = _around(tried)
    if fine is not None and off is not None:
        tried += run([variant.with_rate(fine * (off / fine) ** part) for part in FINER])
        fine, off = _around(tried)
    if any(outcome.was_interrupted for outcome in tried):
        fine = off = None
    return Knee(fine, off, requests_per_second, tuple(sorted(tried, key=lambda outcome: outcome.variant.rate)))


def _around(tried: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """The largest rate below the first at which the queue has taken off, and that one."""
    off = min((outcome.variant.rate for outcome in tried if takes_off(outcome)), default=None)
    fine = [outcome.variant.rate for outcome in tried if off is None or outcome.variant.rate < off]
    return max(fine, default=None), off
