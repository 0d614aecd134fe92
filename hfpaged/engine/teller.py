"""Tells hooks what happens to requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from hfpaged.clock import now
from hfpaged.engine import events
from hfpaged.engine.outputs import FinishReason
from hfpaged.engine.prefix_match import PrefixMatch
from hfpaged.engine.request import Request
from hfpaged.engine.schedule import Schedule

logger = logging.getLogger("hfpaged")


class Teller:
    """`hooks` are told of all events, in order. `interrupt` is what one of them was interrupted by, to be raised by
    whoever makes the step when the others know too: half a step would be the worst place for it.
    """

    def __init__(self) -> None:
        self.hooks: list[events.Hook] = []
        self.interrupt: BaseException | None = None

    def emit(self, event: events.Event) -> None:
        """Tell all hooks."""
        for hook in list(self.hooks):  # another thread may take one away
            try:
                hook(event)
            except Exception:  # who only watches must not stop the work
                logger.exception("a hook raised on %s", type(event).__name__)
            except BaseException as interrupt:
                self.interrupt = interrupt

    def raise_interrupt(self) -> None:
        """Raise what a hook was interrupted by, if any was."""
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt

    def rejected(self, request_id: str | None, tenant: str | None, error: Exception) -> None:
        """Somebody was refused; told by the thread of whoever asked."""
        self.emit(events.Rejected(request_id=request_id or "", tenant=tenant or "", error=error))

    def arrived(self, request: Request) -> None:
        self.emit(
            events.Arrived(
                **_names(request), time=request.arrival_time, prompt_tokens=request.num_prompt_tokens,
                priority=request.priority, params=request.params, origin=request.origin, context=request.context,
                adapter=request.adapter,
            )
        )  # fmt: skip

    def preempted(self, request: Request, lost: int) -> None:
        """`lost` tokens were in the blocks that were taken back."""
        self.emit(events.Preempted(**_names(request), lost=lost, output_tokens=request.num_new))

    def admitted(self, request: Request, waits: Mapping[str, float], *, again: bool) -> None:
        """`waits`: seconds by cause."""
        self.emit(
            events.Admitted(**_names(request), queue_time=sum(waits.values()), again=again, waits=waits)
        )  # fmt: skip

    def matched(self, request: Request, match: PrefixMatch, waited_for: str | None) -> None:
        """Its prompt was looked up."""
        self.emit(events.PrefixMatched(**_names(request), **match._asdict(), waited_for=waited_for))

    def prefilled(self, schedule: Schedule, number: int, began: float) -> None:
        """Step `number` has computed what it was to."""
        for work in schedule.prefills:
            self.emit(
                events.Prefilled(
                    **_names(work.group.request), number=number, began=began, start=work.start, tokens=work.count
                )
            )  # fmt: skip

    def tokens(self, requests: Iterable[Request]) -> dict[float, int]:
        """These got tokens. How many of them did so many seconds after their last one."""
        time = now()
        gaps: dict[float, int] = {}  # by the time of the last one, which many have in common
        for request in requests:
            last, request.last_token_time = request.last_token_time, time
            if last is not None:
                gaps[last] = gaps.get(last, 0) + 1
            else:
                request.first_token_time = time
                self.emit(
                    events.FirstToken(**_names(request), time=time, time_to_first_token=time - request.arrival_time)
                )  # fmt: skip
        return {time - last: count for last, count in gaps.items()}

    def ended(self, request: Request, reason: FinishReason | None) -> None:
        """`reason`: of the whole request, None where each sequence has its own."""
        self.emit(final_event(request, reason))


def _names(request: Request) -> dict[str, Any]:
    return {"request_id": request.request_id, "tenant": request.tenant}


def final_event(request: Request, reason: FinishReason | None) -> events.Ended:
    """Of a request that has ended; `reason` as in Teller.ended."""
    told: dict[str, Any] = _names(request) | {
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_new,
        "sequence_tokens": tuple(seq.num_new for seq in request.sequences),
        "metrics": request.metrics,
    }
    if reason == "error":
        assert request.error is not None
        return events.Failed(**told, error=request.error)
    if reason == "abort":
        return events.Aborted(**told)
    first = request.sequences[0].finish_reason
    assert first is not None
    return events.Finished(**told, finish_reason=first)
