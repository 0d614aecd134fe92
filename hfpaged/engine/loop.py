"""Who makes the steps: many threads may bring, abort and await requests, one at a time computes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from hfpaged.engine.core import Engine
from hfpaged.engine.delivery import Listener, Mailbox
from hfpaged.engine.outputs import RequestOutput
from hfpaged.engine.request import Request
from hfpaged.engine.results import output_of
from hfpaged.errors import InvalidConfigError, NestedStepError

logger = logging.getLogger("hfpaged")


class SpareWork(Protocol):
    """What is done where requests do not notice. None of it raises, but for Ctrl-C."""

    def after_step(self, seconds: float) -> None:
        """A step took so long, and its outputs are delivered."""

    def work(self) -> bool:
        """A short piece, while there is nothing else to do; whether there was any."""

    def give_up(self) -> None:
        """Nothing of it will be done any more."""


class EngineLoop:
    """The engine behind a lock, and what is to be done when nobody holds it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()  # whoever holds it makes the step
        self._driver = threading.Lock()  # of who makes steps until the outputs that he waits for have come
        self._claim = threading.Lock()  # of the one running engine
        self._inbox: deque[tuple[Callable[[Request], None], Request]] = deque()
        self.spare: SpareWork | None = None
        self._outputs: list[RequestOutput] = []  # not given back yet, as Ctrl-C came between
        self._unheard: list[RequestOutput] = []  # last ones that others' steps made, of requests without a listener
        self._stepper: int | None = None  # the thread that makes the step under way
        self._came = threading.Event()  # something was put into the inbox
        self._requests: dict[str, Request] = {}  # those whose end has not been delivered
        self._listeners: dict[str, Listener] = {}

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._outputs or self._unheard) or self.engine.has_work

    @property
    def requests(self) -> Mapping[str, Request]:
        """Those whose end has not been delivered, by id."""
        return self._requests

    def is_there(self, request_id: str) -> bool:
        """Whether a request has this name by now."""
        return request_id in self._requests

    def add(self, request: Request, listener: Listener | None, *, only_end: bool = False) -> None:
        """Let a request wait for the next step; its listener is given all outputs, or `only_end` the last one.

        Raises InvalidConfigError for an id that is there already.
        """
        if self._requests.setdefault(request.request_id, request) is not request:
            raise InvalidConfigError(
                f"request_id={request.request_id!r} is running already; give each request another one"
            )
        if listener is not None:
            self._listeners[request.request_id] = listener
            request.is_awaited_at_end = only_end
        self._inbox.append((self.engine.add, request))
        self._came.set()

    def abort(self, request_id: str, now: bool = True) -> bool:
        """Give a request up, at any moment and from any thread; whether it was still there. Its blocks go back now, or
        at the end of the step that is under way, and its record comes with the next step, with finish_reason "abort".
        Not `now`: all of that comes with the next step, and no lock is taken.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return False
        self._inbox.append((self.engine.abort, request))
        if now:
            self._settle()
            self._came.set()
        return True

    def step(self) -> list[RequestOutput]:
        """One step; the records of the requests that got tokens or came to their end since the last one.

        Raises NestedStepError in a hook or a listener, which a step has called. Ctrl-C in one of these is raised when
        all others have been told; the records come with the next step then.
        """
        outputs = self._step(lambda request: True)
        unheard, self._unheard = self._unheard, []
        return [output for output in unheard if all(output is not other for other in outputs)] + outputs

    def _step(self, is_wanted: Callable[[Request], bool]) -> list[RequestOutput]:
        """A step, with the records that are wanted of it."""
        with self._held():
            self._make_step(is_wanted)
            outputs, self._outputs = self._outputs, []
        self._settle()
        return outputs

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """No step is made meanwhile. Raises NestedStepError inside of one."""
        with self._held():
            yield
        self._settle()

    def work_spare(self) -> bool:
        """A short piece of what can wait, for who has no request to make a step for; whether there was any. Raises
        NestedStepError inside of a step.
        """
        if self.spare is None:
            return False
        with self.between_steps():
            return self.spare.work()

    def wake(self) -> None:
        """Let `wait_for_work` return."""
        self._came.set()

    def wait_for_work(self, seconds: float) -> None:
        """Until a request comes, or one is aborted; at most so long."""
        self._came.wait(seconds)
        self._came.clear()

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Make the steps for all who wait for outputs, until this is left."""
        with self._driver:
            yield

    def claim(self) -> bool:
        """Whether there is no running engine yet; if so there is one until `unclaim`."""
        return self._claim.acquire(blocking=False)

    def unclaim(self) -> None:
        """The next one may run."""
        self._claim.release()

    def end_all(self, error: Exception | None = None) -> None:
        """Give up all requests, or fail them with an error, and let those who listen know. It makes no step."""
        with self._held():
            self._read_inbox()
            self._outputs = []
            for request in self.engine.end_all(list(self._requests.values()), error):
                self._deliver(output_of(request))
            self._unheard = []
            if self.spare is not None:
                self.spare.give_up()
            self.engine.tells.raise_interrupt()

    def next_output(self, mailbox: Mailbox) -> RequestOutput:
        """The next output for somebody who waits: he makes the steps himself unless another thread does."""
        self.check_not_inside()
        while (output := mailbox.take()) is None:
            if not self._driver.acquire(blocking=False):
                mailbox.wait(0.02)
                continue
            try:
                self._step(_is_awaited)
            finally:
                self._driver.release()
        return output

    def _make_step(self, is_wanted: Callable[[Request], bool]) -> None:
        self._read_inbox()
        began = time.perf_counter()
        for request in self.engine.step() if self.engine.has_work else ():
            if is_wanted(request):
                output = output_of(request)
                self._deliver(output)  # under the lock, so that each listener gets them in order
                self._outputs.append(output)
        if self.spare is not None:
            self.spare.after_step(time.perf_counter() - began)
        self.engine.tells.raise_interrupt()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The lock, for this thread. Raises NestedStepError where it has it already."""
        self.check_not_inside()
        with self._lock:
            self._stepper = threading.get_ident()
            try:
                yield
            finally:
                self._stepper = None

    def check_not_inside(self) -> None:
        """Waiting for the step that one is in would take for ever. Raises NestedStepError."""
        if self._stepper == threading.get_ident():
            raise NestedStepError(
                "a hook or a listener runs inside of a step, and no other step can be made there; add or abort "
                "requests, and leave the steps to whoever makes this one"
            )

    def _read_inbox(self) -> None:
        while self._inbox:
            act, request = self._inbox.popleft()
            try:
                act(request)
            except BaseException:  # Ctrl-C came in between, and half a request would never end
                self.engine.abort(request)
                raise

    def _settle(self) -> None:
        """Do what was asked for while a step was under way, unless another one is by now and will."""
        while self._inbox and self._lock.acquire(blocking=False):
            self._stepper = threading.get_ident()  # hooks are told
            try:
                self._read_inbox()
            finally:
                self._stepper = None
                self._lock.release()

    def _deliver(self, output: RequestOutput) -> None:
        listener = self._listeners.get(output.request_id)
        if output.finished and listener is None:
            self._unheard.append(output)
        if output.finished:
            self._requests.pop(output.request_id, None)
            self._listeners.pop(output.request_id, None)
        if listener is not None:
            try:
                listener(output)
            except Exception:
                logger.exception("the listener of request %s raised", output.request_id)
            except BaseException as interrupt:
                self.engine.tells.interrupt = interrupt


def _is_awaited(request: Request) -> bool:
    """Whether somebody looks at what a request has now."""
    return request.is_finished or not request.is_awaited_at_end
