"""Many replays of one trace, in processes of their own, with a bar for all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hfpaged.planner.cost_model import CostModel
from hfpaged.planner.outcome import Outcome
from hfpaged.planner.replay import replay
from hfpaged.planner.trace import Trace
from hfpaged.planner.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_SECONDS = 0.2


@dataclass
class Runs:
    """How variants are run. `told` gets the requests that are over in all runs of the call. `was_interrupted` is true
    from the first Ctrl-C on; what was not begun then is left out.
    """

    trace: Trace
    cost: CostModel
    jobs: int = 1
    told: Callable[[int], None] | None = None
    was_interrupted: bool = False

    def run(self, variants: Sequence[Variant], trace: Trace | None = None) -> list[Outcome]:
        """The outcomes in the order of the variants, of those that were begun."""
        if self.was_interrupted:
            return []
        trace = trace or self.trace
        if min(self.jobs, len(variants)) <= 1 or "fork" not in multiprocessing.get_all_start_methods():
            return list(self._one_by_one(variants, trace))
        return self._side_by_side(variants, trace)

    def _one_by_one(self, variants: Sequence[Variant], trace: Trace) -> Iterator[Outcome]:
        done = 0
        for variant in variants:
            if self.was_interrupted:
                return
            outcome = replay(trace, variant, self.cost, lambda count, done=done: self._tell(done + count))  # type: ignore[misc]
            self.was_interrupted |= outcome.was_interrupted
            done += outcome.requests
            self._tell(done)
            yield outcome

    def _side_by_side(self, variants: Sequence[Variant], trace: Trace) -> list[Outcome]:
        """The trace is not copied: a process is forked for each variant, and all read the memory of this one."""
        context = multiprocessing.get_context("fork")
        counts = context.Array("q", len(variants), lock=False)
        waiting = list(enumerate(variants))
        running: dict[int, tuple[Any, Connection]] = {}
        done: dict[int, Outcome] = {}
        while waiting or running:
            try:
                while waiting and len(running) < self.jobs and not self.was_interrupted:
                    number, variant = waiting.pop(0)
                    mine, theirs = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_work, args=(trace, variant, self.cost, counts, number, theirs, os.getpid()), daemon=True
                    )
                    process.start()
                    theirs.close()
                    running[number] = process, mine
                self._collect(running, done)
                self._tell(sum(counts))
            except KeyboardInterrupt:
                self.was_interrupted, waiting = True, []
                for process, _ in running.values():
                    os.kill(process.pid, signal.SIGINT)
        return [done[number] for number in sorted(done)]

    @staticmethod
    def _collect(running: dict[int, tuple[Any, Connection]], done: dict[int, Outcome]) -> None:
        for connection in multiprocessing.connection.wait([each for _, each in running.values()], POLL_SECONDS):
            number = next(number for number, (_, mine) in running.items() if mine is connection)
            process, mine = running.pop(number)
            try:
                done[number] = mine.recv()
            except EOFError:
                process.join()
                raise RuntimeError(
                    f"the replay of variant {number + 1} ended without an answer (exit code {process.exitcode}); "
                    "the machine may be short of memory: use fewer --jobs"
                ) from None
            process.join()

    def _tell(self, count: int) -> None:
        if self.told is not None:
            self.told(count)


def _work(
    trace: Trace, variant: Variant, cost: CostModel, counts: Any, number: int, answer: Connection, parent: int
) -> None:
    """In a process of its own."""
    stops = False

    def stop(*signal: object) -> None:
        nonlocal stops
        stops = True

    def told(count: int) -> None:
        counts[number] = count
        if os.getppid() != parent:  # nobody is there to be answered
            os._exit(1)
        if stops:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    answer.send(replay(trace, variant, cost, told))
    counts[number] = len(trace.requests)


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal; call what is given with the requests that are over."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # No thread of its own: processes are forked meanwhile.
    with Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False) as bars:
        task = bars.add_task("requests replayed", total=total)
        shown_at = time.perf_counter()

        def advance(done: int) -> None:
            nonlocal shown_at
            bars.update(task, completed=done)
            if time.perf_counter() - shown_at > POLL_SECONDS:
                shown_at = time.perf_counter()
                bars.refresh()

        yield advance
