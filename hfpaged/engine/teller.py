"""Tells hooks what happens to requests."""

from __future__ import annotations

import logging
from typing import Any

from hfpaged.engine import events
from hfpaged.engine.outputs import FinishReason
from hfpaged.engine.request import Request

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
        for hook in self.hooks:
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

    def arrived(self, request: Request) -> None:
        self.emit(
            events.Arrived(
                **_names(request), time=request.arrival_time, prompt_tokens=request.num_prompt_tokens,
                priority=request.priority,
            )
        )  # fmt: skip

    def preempted(self, request: Request, lost: int) -> None:
        """`lost` tokens were in the blocks that were taken back."""
        self.emit(events.Preempted(**_names(request), lost=lost))

    def first_token(self, request: Request) -> None:
        """Nothing if it has been told."""
        if request.first_token_time is None:
            request.first_token_time = time = events.now()
            self.emit(
                events.FirstToken(**_names(request), time=time, time_to_first_token=time - request.arrival_time)
            )  # fmt: skip

    def ended(self, request: Request, reason: FinishReason | None) -> None:
        """`reason`: of the whole request, None where each sequence has its own."""
        self.emit(_final_event(request, reason))


def _names(request: Request) -> dict[str, Any]:
    return {"request_id": request.request_id, "tenant": request.tenant}


def _final_event(request: Request, reason: FinishReason | None) -> events.RequestEvent:
    if reason == "error":
        assert request.error is not None
        return events.Failed(**_names(request), error=request.error, metrics=request.metrics)
    tokens = sum(seq.num_new for seq in request.sequences)
    if reason == "abort":
        return events.Aborted(**_names(request), output_tokens=tokens, metrics=request.metrics)
    first = request.sequences[0].finish_reason
    assert first is not None
    return events.Finished(**_names(request), finish_reason=first, output_tokens=tokens, metrics=request.metrics)
