"""How what steps give back reaches those who wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hfpaged.engine.outputs import FinishReason, RequestOutput

Listener = Callable[[RequestOutput], None]


class StreamEvent(NamedTuple):
    """What is new of one sequence. `finish_reason` is set in its last event; `output` is all that there is by now."""

    request_id: str
    index: int  # type: ignore[assignment]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None
    output: RequestOutput


class Mailbox:
    """Outputs for one who waits, in order. Any thread may put, one takes."""

    def __init__(self) -> None:
        self._outputs: deque[RequestOutput] = deque()
        self._came = threading.Event()

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._came.set()

    def take(self) -> RequestOutput | None:
        """The next one, None if there is none by now."""
        self._came.clear()
        return self._outputs.popleft() if self._outputs else None

    def wait(self, seconds: float) -> None:
        """Until one comes, at most so long."""
        if not self._outputs:
            self._came.wait(seconds)


class Stream(Iterator[StreamEvent]):
    """What is new of one request, as soon as it is. `close` aborts it; so does dropping the stream, with the next step.

    `next_output` waits for the next output of the mailbox, `abort` takes the request and whether to do it now.
    """

    def __init__(
        self, request_id: str, mailbox: Mailbox, next_output: Callable[[Mailbox], RequestOutput],
        abort: Callable[[str, bool], bool],
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self._mailbox, self._next_output, self._abort = mailbox, next_output, abort
        self._deltas, self._events = Deltas(), deque[StreamEvent]()
        self._is_over = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamEvent:
        while not self._events:
            if self._is_over:
                raise StopIteration
            output = self._next_output(self._mailbox)
            self._is_over = output.finished
            self._events.extend(self._deltas.of(output))
        return self._events.popleft()

    def close(self) -> None:
        """Give the request up, if it has not ended."""
        if not self._is_over:
            self._is_over = True
            self._abort(self.request_id, True)

    def __del__(self) -> None:
        if not self._is_over:  # perhaps in the middle of anything: whoever makes the next step does it
            self._abort(self.request_id, False)


class Deltas:
    """Turns outputs of one request, each of which holds all so far, into what is new in them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # by sequence: tokens, characters
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> list[StreamEvent]:
        """The events that an output is worth."""
        found = []
        for seq in output.sequences:
            tokens, characters = self._seen.get(seq.index, (0, 0))
            ids, text = seq.tokens.tolist(tokens), None if seq.text is None else seq.text[characters:]
            ends = seq.finish_reason is not None and seq.index not in self._ended
            if ids or text or ends:
                found.append(StreamEvent(output.request_id, seq.index, ids, text, seq.finish_reason, output))
            self._seen[seq.index] = (tokens + len(ids), characters + len(text or ""))
            if ends:
                self._ended.add(seq.index)
        return found
