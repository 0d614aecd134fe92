"""The ranks that compute a batcher's model together. Rank 0 has the requests, the blocks, and the say: each of its
forwards is told to the others before it begins, and they make the same one on their own heads.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch.distributed as dist

from hfpaged.engine.outcome import from_numbers, to_numbers
from hfpaged.engine.plan_channel import PlanChannel
from hfpaged.engine.rank_watch import RankWatch
from hfpaged.errors import BatcherClosedError, NotLeaderError, PackedForwardError, RankLostError
from hfpaged.packed_plan import PackedPlan
from hfpaged.ranks import Ranks

if TYPE_CHECKING:
    from hfpaged.engine.model_runner import ModelRunner

FORWARD, OUTCOME, CLOSE = range(3)
# Of rank 0, by torch's group: sums of two forwards, of two batchers in two threads say, would meet in it.
_turns: dict[dist.ProcessGroup, threading.Lock] = {}
CLOSED = "rank 0 has closed this batcher; make another one, on all ranks"
Value = TypeVar("Value")


class OneProcess:
    """The same for a model that one process computes."""

    leads, fault = True, None

    def check_leads(self) -> None:
        pass

    @contextmanager
    def starting(self) -> Iterator[None]:
        yield

    def join(self, runner: ModelRunner) -> None:
        pass

    def together(self, runner: ModelRunner, call: Callable[[], Value]) -> Value:
        return call()

    def follow(self, runner: ModelRunner) -> None:
        raise NotLeaderError("one process computes this model, and there is nobody to follow")

    def when_lost(self, told: Callable[[str], None]) -> None:
        pass

    def leave(self) -> None:
        pass

    close = leave


class RankGroup:
    """Of one batcher. All ranks make it, and `close` it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.channel = PlanChannel(ranks)
        self.watch = RankWatch(ranks)
        self.is_closed = False
        self._sending, self._following = threading.Lock(), threading.Lock()
        self._turn = _turns.setdefault(ranks.group, threading.Lock())
        atexit.register(self._at_exit)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_first

    @property
    def fault(self) -> str | None:
        """Why no rank can go on; None while all is well."""
        return self.watch.fault

    def check_leads(self) -> None:
        """Raises NotLeaderError, RankLostError."""
        if not self.leads:
            raise NotLeaderError(
                f"this is {self.ranks}, and requests go to rank 0: let every rank make the same calls of generate(), "
                "or ask batcher.is_leader, and let the others call batcher.follow()"
            )
        self.watch.check()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around what all ranks do before they have a batcher. Raises RankLostError where one is gone; where this one
        fails alone, the others are told.
        """
        try:
            with self.watch.waiting():
                yield
        except BaseException as error:
            fault = self.watch.soon()
            self.leave()
            if fault is not None:
                raise RankLostError(fault) from error
            raise

    def join(self, runner: ModelRunner) -> None:
        """Every forward of `runner` is made by all ranks from now on."""
        runner.lead = self.lead

    @contextmanager
    def lead(self, plan: PackedPlan) -> Iterator[None]:
        """Around a forward on rank 0. Whatever it raises, but for PackedForwardError, ends the group: RankLostError."""
        refused = None
        with self._turn, interrupts_later(), self.watch.busy():
            self._send(FORWARD, plan.numbers())
            try:
                yield
            except PackedForwardError as error:  # as all ranks do
                refused = error
        if refused is not None:
            raise refused

    def together(self, runner: ModelRunner, call: Callable[[], Value]) -> Value:
        """A call that all ranks make: rank 0 does it, the others compute what it has them compute, and give back or
        raise what it does. Raises RankLostError and BatcherClosedError on all of them.
        """
        if not self.leads:
            return cast("Value", self._follow(runner, OUTCOME))
        if self.is_closed:
            raise BatcherClosedError(CLOSED)
        self.watch.check()
        try:
            value = call()
            self.watch.check()
        except RankLostError:
            raise
        except BaseException as error:
            self._tell_outcome(None, error)
            raise
        self._tell_outcome(value, None)
        return value

    def follow(self, runner: ModelRunner) -> None:
        """On all ranks but 0: compute what rank 0 has them compute, until it closes the group. Of several threads one
        does, the others wait for it.
        """
        if self.leads:
            raise NotLeaderError("this is rank 0, which leads; follow() is for the other ranks, see is_leader")
        self._follow(runner, CLOSE)

    def when_lost(self, told: Callable[[str], None]) -> None:
        """Tell of a fault, now or when it comes, in a thread of the watch."""
        self.watch.when_lost(told)

    def close(self) -> None:
        """Rank 0 lets the others go; they go."""
        if self.leads and not self.is_closed and self.watch.fault is None:
            with suppress(RuntimeError), self.watch.waiting():  # somebody has died just now
                self._send(CLOSE, np.empty(0, dtype=np.int64))
        self.leave()

    def leave(self) -> None:
        """This rank takes no further part. If others still need it they will say so."""
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self._at_exit)
        self.watch.close()
        if self.watch.fault is None:
            self.channel.close()

    def _follow(self, runner: ModelRunner, until: int) -> Any:
        with self._following, _no_interrupts():
            while not self.is_closed:
                with self.watch.busy():
                    kind, numbers = self.channel.receive()
                    if kind == FORWARD:
                        with suppress(PackedForwardError):  # rank 0 got it too, and does it in another way
                            runner.follow(PackedPlan.of(numbers))
                if kind == CLOSE:
                    self.leave()
                elif kind == until:
                    return from_numbers(numbers)
        if until != CLOSE:
            raise BatcherClosedError(CLOSED)
        return None

    def _tell_outcome(self, value: Any, error: BaseException | None) -> None:
        with interrupts_later(), self.watch.busy():
            self._send(OUTCOME, to_numbers(value, error))

    def _send(self, kind: int, numbers: np.typing.NDArray[np.int64]) -> None:
        with self._sending:
            self.channel.send(kind, numbers)

    def _at_exit(self) -> None:
        """The program ends, and nobody has called `close`."""
        if self.watch.is_busy:  # in a thread that ends with it
            self.leave()
        else:
            self.close()


def group_of(ranks: Ranks | None) -> RankGroup | OneProcess:
    """All ranks must call it."""
    return OneProcess() if ranks is None else RankGroup(ranks)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Ctrl-C inside is raised behind it: others wait for what is done there."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all ranks, and rank 0 decides what becomes of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
