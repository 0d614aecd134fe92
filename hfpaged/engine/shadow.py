"""Shadow decoding: a sample of live requests is computed once more with the native cache, to see what the quantized
one costs in real traffic.

    arrival   a draw decides; from then on logits of the request are kept, at up to 64 positions
    end       its tokens wait; in spare time they are computed again, in small pieces, by the thread that makes steps
    after     KL(native || live) and top-1 agreement of each position are told as an event; the tally counts them

Live tokens do not depend on any of it. Nothing of a text or a token is told.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

import torch

from hfpaged import compat
from hfpaged.engine import events
from hfpaged.engine.adapter_routing import AdapterRouter
from hfpaged.engine.request import Request
from hfpaged.engine.shadow_capture import Capture, Room
from hfpaged.engine.shadow_run import NativeRun
from hfpaged.engine.spare_time import SpareTime
from hfpaged.errors import AdapterLostError
from hfpaged.pool_size import free_memory
from hfpaged.spread import input_device

logger = logging.getLogger("hfpaged")

MOST_BYTES = 256 << 20  # of all captured logits together, in the machine's memory
MOST_WAITING = 16  # requests that have ended and wait to be computed again
MOST_CACHE_BYTES = 1 << 30  # of the native cache of one request, on the device


class Ended(NamedTuple):
    """A request that waits to be computed again: a copy of its tokens, and the adapter that acted."""

    capture: Capture
    tokens: list[int]
    adapter: str | None


class Shadow:
    """A hook that draws requests, and spare work of an EngineLoop. All of it runs under the loop's lock.

    Args:
        share: of requests, a part of 1.
        kv_format: of the pool, the label of all that is counted.
        router: of adapters and forwards.
        requests: those of the loop, by id.
        emit: tells hooks.
        longest_prompt: for models that need their prompt at once, and all else one by one: prompts of so many tokens at
            most; None: others.
        seed: of the draws; None: another one each time.
    """

    def __init__(
        self, share: float, kv_format: str, router: AdapterRouter, requests: Mapping[str, Request],
        emit: Callable[[events.Event], None], longest_prompt: int | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._share, self._kv_format, self._router = share, kv_format, router
        self._requests, self._emit, self._random = requests, emit, Random(seed)
        self._longest_prompt = longest_prompt
        self.room = Room(MOST_BYTES)
        self._captures: dict[str, Capture] = {}  # of requests that run
        self._waiting: deque[Ended] = deque()
        self._run: NativeRun | None = None  # of the first that waits
        self._time = SpareTime()
        self._seconds = 0.0  # for the first that waits, so far

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Arrived):
            self._arrived(event)
        elif isinstance(event, events.Ended) and event.request_id in self._captures:
            self._ended(event)

    @property
    def num_pending(self) -> int:
        """Requests whose logits are kept, those that run and those that wait."""
        return len(self._captures) + len(self._waiting)

    def after_step(self, seconds: float) -> None:
        """A step took so long: perhaps it has earned a piece of work. It never raises but for Ctrl-C."""
        self._time.earn(seconds)
        if self._waiting and self._time.is_earned:
            self._work(beside=True)

    def work(self) -> bool:
        """One piece; whether there was any. It never raises but for Ctrl-C."""
        if not self._waiting:
            return False
        self._work(beside=False)
        return True

    def _work(self, *, beside: bool) -> None:
        began, first = time.perf_counter(), self._waiting[0]
        reason, tokens = "", 0
        try:
            with self._router.chosen(first.adapter):
                tokens, reason = self._advance(first)
        except AdapterLostError:
            reason = "adapter_lost"
        except torch.OutOfMemoryError:
            reason = "memory"
        except Exception as error:
            logger.warning("shadow: the native run of a request failed with %s; it is left out", type(error).__name__)
            reason = "error"
        except BaseException:  # Ctrl-C: some layers may have the piece by now, so it begins anew
            self._run = None
            raise
        seconds = time.perf_counter() - began
        self._seconds += seconds
        self._time.spend(tokens, seconds, beside=beside)
        if reason or (self._run is not None and self._run.is_done):
            self._close_first(reason)

    def give_up(self) -> None:
        """Nobody makes steps any more: what waits goes."""
        while self._waiting:
            self._close_first("stopped")

    def _arrived(self, event: events.Arrived) -> None:
        request = self._requests.get(event.request_id)
        if self._random.random() >= self._share or request is None:
            return
        if event.params.num_beams > 1:  # they take each other's tokens
            self._drop("beams")
            return
        # Of several samples the first: it is as good as the others.
        seq = request.sequences[0]
        self._captures[event.request_id] = seq.capture = Capture(seq, self.room, self._random)

    def _ended(self, event: events.Ended) -> None:
        capture = self._captures.pop(event.request_id)
        capture.seq.capture = None
        if isinstance(event, (events.Aborted, events.Failed)):
            capture.lose("aborted" if isinstance(event, events.Aborted) else "failed")
        elif not capture.why_lost and len(self._waiting) >= MOST_WAITING:
            capture.lose("backlog")
        if capture.why_lost:
            self._drop(capture.why_lost)
        elif capture.rows:
            self._waiting.append(Ended(capture, capture.seq.tokens.tolist(), capture.seq.request.adapter))

    def _advance(self, first: Ended) -> tuple[int, str]:
        """How many tokens were computed, and why the rest will not be."""
        model = compat.transformers_model(self._router.model)
        if self._run is None:
            prompt = None if self._longest_prompt is None else first.capture.seq.request.num_prompt_tokens
            if prompt is not None and prompt > (self._longest_prompt or 0):
                return 0, "too_long"
            self._run = NativeRun(model, first.tokens, first.capture.rows, prompt)
        tokens = 0 if self._run.is_done else self._run.advance(self._time.tokens)  # Ctrl-C came behind it
        size = self._run.cache_bytes
        if size > MOST_CACHE_BYTES:
            return tokens, "too_long"
        # Twice: a layer that grows is there in its old and its new size, and live traffic has its own peaks.
        return tokens, "memory" if 2 * size > free_memory(input_device(model)) else ""

    def _close_first(self, reason: str) -> None:
        """The first that waits is done, or left out for this reason."""
        run, self._run = self._run, None
        seconds, self._seconds = self._seconds, 0.0
        self._waiting.popleft().capture.clear()
        if reason or run is None:
            self._drop(reason, seconds)
        elif not all(abs(kl) < float("inf") for kl in run.kl):
            self._drop("not_finite", seconds)
        else:
            self._emit(
                events.ShadowCompared(kv_format=self._kv_format, kl=tuple(run.kl), agreed=run.agreed, seconds=seconds)
            )

    def _drop(self, reason: str, seconds: float = 0.0) -> None:
        self._emit(events.ShadowDropped(kv_format=self._kv_format, reason=reason, seconds=seconds))
