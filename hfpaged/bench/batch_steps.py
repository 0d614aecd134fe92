"""Listens to a batcher while it runs: its steps with the time from one to the next, and its preemptions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hfpaged.engine.events import Event, Preempted, StepFinished


@dataclass(frozen=True)
class Step:
    """`seconds` since the step before was over: the caller's loop and everybody who listens are in it too."""

    seconds: float
    event: StepFinished

    @property
    def bookkeeping(self) -> float:
        """Seconds of it that were neither forward nor sampling."""
        return self.seconds - self.event.forward_seconds - self.event.sampling_seconds

    @property
    def use(self) -> float:
        """The part of the pool's blocks that was taken."""
        return self.event.blocks_used / self.event.blocks_total


@dataclass
class Steps:
    """All steps but the first, which has none before it. `unhurried` of them came before any preemption."""

    steps: list[Step] = field(default_factory=list)
    preemptions: int = 0
    unhurried: int = 0
    _last: float | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Preempted):
            self.preemptions += 1
        elif isinstance(event, StepFinished):
            now = time.perf_counter()
            if self._last is not None:
                self.steps.append(Step(now - self._last, event))
            self._last = now
            self.unhurried = self.unhurried if self.preemptions else len(self.steps)

    def decoding(self, sequences: int) -> list[Step]:
        """The steps in which exactly so many sequences got one token each."""
        return [
            step for step in self.steps if (step.event.num_sequences, step.event.num_tokens) == (sequences, sequences)
        ]
