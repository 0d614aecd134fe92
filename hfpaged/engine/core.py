"""The engine: one step after the other, for all requests together. One thread at a time; the batcher sees to that."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from transformers import PreTrainedModel

from hfpaged.clock import now
from hfpaged.engine import events
from hfpaged.engine.adapter_routing import AdapterRouter
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.outputs import FinishReason
from hfpaged.engine.pacing import Pace
from hfpaged.engine.piece import piece_of
from hfpaged.engine.prefix_match import PrefixMatch, prefix_match
from hfpaged.engine.request import Request, SequenceGroup
from hfpaged.engine.roots import give_roots
from hfpaged.engine.schedule import Admission, Schedule
from hfpaged.engine.scheduler import Scheduler
from hfpaged.engine.sequence_end import has_ended, is_half_done
from hfpaged.engine.sequence_maker import SequenceMaker
from hfpaged.engine.settling import settle_waiting
from hfpaged.engine.teller import Teller
from hfpaged.engine.token_step import TokenStep, wanted_logits
from hfpaged.errors import AdapterLostError, OutOfBlocksError
from hfpaged.kv_pool import KVPool


class Engine:
    """`tells` hooks of all that happens."""

    def __init__(
        self, model: PreTrainedModel, runner: ModelRunner, router: AdapterRouter, scheduler: Scheduler,
        maker: SequenceMaker, pace: Pace, *, shares_prefixes: bool,
    ) -> None:  # fmt: skip
        self.pool: KVPool = runner.cache.pool
        self.tells = Teller()
        self.num_steps = 0
        self.step_began: float | None = None  # of the one under way, for who watches over it
        self._model, self._runner, self._router, self._scheduler = model, runner, router, scheduler
        self.shares_prefixes = shares_prefixes
        self._maker, self._pace = maker, pace
        self._rootless: list[Request] = []  # arrived since the last step
        self._moved: dict[Request, None] = {}  # got tokens or ended since the last step
        self._under_way: tuple[Schedule, TokenStep] | None = None
        self._began = now()  # the last step
        self._gaps: dict[float, int] = {}  # of the last step: between two tokens of a request

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work or bool(self._moved)

    def add(self, request: Request) -> None:
        """A request begins to wait."""
        request.block_bytes = self.pool.storage.block_bytes
        self._rootless.append(request)
        for group in request.groups:
            self._scheduler.add(group)
        self.tells.arrived(request)

    def abort(self, request: Request) -> None:
        """Give a request up; its blocks go back now."""
        self._end(request, "abort")

    def end_all(self, requests: Iterable[Request], error: Exception | None) -> Iterator[Request]:
        """Give all up, or fail them, without a step, which may be what fails; those that moved since the last one."""
        if error is None:
            for request in requests:
                self.abort(request)
        else:
            self._fail(requests, error)
        self._under_way = None
        return self._take_moved()

    def step(self) -> Iterator[Request]:
        """One step; the requests that got tokens or came to their end since the last one."""
        began = self.step_began = time.perf_counter()
        self.num_steps += 1
        try:
            self._complete()  # Ctrl-C may have ended the last step in the middle
            self._began = now()
            schedule = self._schedule()
            tokens = TokenStep(self.pool, self._scheduler, self._maker)
            self._under_way = schedule, tokens
            forward = self._runner.seconds
            self._compute(schedule, tokens)
            forward = self._runner.seconds - forward
            self._complete()
            self._report(schedule, tokens, time.perf_counter() - began, forward)
            return self._take_moved()
        finally:
            self.step_began = None

    def _take_moved(self) -> Iterator[Request]:
        """Each is forgotten when the next one is asked for: with whom Ctrl-C comes, he and all others come again."""
        for request in sorted(self._moved, key=lambda request: request.number):
            yield request
            del self._moved[request]

    def _schedule(self) -> Schedule:
        decoding = self._propose()
        self._find_roots()
        settle_waiting(self.pool, self._scheduler)
        with self.pool.changing():
            schedule = self._scheduler.schedule(self._pace.budget(decoding))
            matches = [prefix_match(self.pool.prefixes.index, admission) for admission in schedule.admitted]
        for group, lost in schedule.preempted:
            self.tells.preempted(group.request, lost)
        for admission, match in zip(schedule.admitted, matches, strict=True):
            self._tell_admitted(admission, match)
        if schedule.stuck is not None:
            self._fail([schedule.stuck.request], self._no_room(schedule.stuck))
        return schedule

    def _propose(self) -> int:
        """Drafts for sequences that speculate; returns how many sequences decode."""
        decoding = 0
        for group in self._scheduler.running:
            if group.is_decoding:
                decoding += len(group.sequences)
                for seq in group.sequences:
                    if seq.lookup is not None:
                        room = group.request.params.max_new_tokens - seq.num_new - 1
                        seq.draft = seq.lookup.propose(seq.tokens)[: max(room, 0)]
        return decoding

    def _find_roots(self) -> None:
        arrived, self._rootless = self._rootless, []
        self._runner.check_model(is_due=bool(arrived))
        if self.shares_prefixes:
            for request, error in give_roots(self.pool, self._model, self._router, arrived).items():
                self._fail([request], error)

    def _tell_admitted(self, admission: Admission, match: PrefixMatch | None) -> None:
        request = admission.group.request
        again = request.admitted_time is not None
        if not again:
            request.admitted_time, request.num_cached_tokens = now(), admission.found
        self.tells.admitted(request, admission.waits, again=again)
        if match is None or again:
            return
        self.tells.matched(request, match, admission.group.waited_for)
        with self.pool.changing():
            counts = self.pool.prefixes.index.counts
            counts.queries += match.queried
            counts.hits += match.hit

    def _compute(self, schedule: Schedule, tokens: TokenStep) -> None:
        """The forward, and what is sampled from it."""
        if not schedule.work:
            return
        counts = [wanted_logits(work) for work in schedule.work]
        try:
            logits = self._router.forward(
                [piece_of(work, count) for work, count in zip(schedule.work, counts, strict=True)]
            )
            tokens.take(schedule.work, logits, counts)
        except OutOfBlocksError:  # another cache on the pool was faster; the next step knows
            return
        except AdapterLostError as error:  # before anything was computed
            requests = dict.fromkeys(work.group.request for work in schedule.work)
            self._fail([request for request in requests if request.adapter in error.names], error)
        except Exception as error:  # fails these requests, and nobody else
            self._fail(dict.fromkeys(work.group.request for work in schedule.work), error)

    def _complete(self) -> None:
        """The end of a step, however it went. What was stored and not sampled is computed again."""
        if self._under_way is None:
            return
        schedule, tokens = self._under_way
        self._finish(schedule, tokens)
        if schedule.work and not tokens.is_done:
            starts = {work.seq: work.start for work in schedule.work}
            for group in [group for group in self._scheduler.running if is_half_done(group, starts)]:
                self.tells.preempted(group.request, group.num_computed)
                with self.pool.changing():
                    self._scheduler.preempt(group)
        self._under_way = None

    def _finish(self, schedule: Schedule, tokens: TokenStep) -> None:
        """After sampling: what failed or came to its end gives its blocks back."""
        self._moved |= tokens.moved
        if tokens.is_done:
            self.tells.prefilled(schedule, self.num_steps, self._began)
        self._gaps = self.tells.tokens(tokens.moved)
        for request, error in tokens.failed.items():
            self._fail([request], error)
        ended = tokens.ended if tokens.is_done else tokens.moved  # Ctrl-C may have come before it was noted
        with self.pool.changing():  # before the first one goes: together they have borne what they share
            for request in ended:
                request.look_at_memory(self.pool.blocks)
        for request in ended:
            if not request.is_finished:
                self._release_ended(request)

    def _release_ended(self, request: Request) -> None:
        """The groups of a request that have nothing left to do."""
        ended = [group for group in request.groups if has_ended(group)]
        if not ended:
            return
        with self.pool.changing():
            for group in ended:
                request.groups.remove(group)
                self._scheduler.remove(group)
        if not request.groups:
            self._end(request)

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        for request in requests:
            if not request.is_finished:
                request.error = error
                self._end(request, "error")

    def _end(self, request: Request, reason: FinishReason | None = None) -> None:
        """The one end of a request; `reason` for sequences that have none of their own."""
        if request.is_finished:
            return
        with self.pool.changing():
            request.look_at_memory(self.pool.blocks)
            for group in request.groups:
                self._scheduler.remove(group)
        request.groups, request.is_finished, request.finished_time = [], True, now()
        for seq in request.sequences:
            seq.finish_reason = seq.finish_reason or reason
        self._moved[request] = None
        self.tells.ended(request, reason)

    def _no_room(self, group: SequenceGroup) -> OutOfBlocksError:
        needed, others = self._scheduler.needs.still(group.sequences[0], 1), " Others than this batcher hold the rest"
        return OutOfBlocksError(needed, self.pool.num_free, self.pool.num_blocks, others)

    def _report(self, schedule: Schedule, tokens: TokenStep, seconds: float, forward: float) -> None:
        self._pace.told(schedule.num_decodes, schedule.num_prefill_tokens, seconds)
        if self.pool.swapping is not None and tokens.is_done:
            self.pool.swapping.told_step(schedule.num_prefill_tokens, schedule.num_decodes, seconds)
        if self.tells.hooks:
            blocks, computed = self.pool.blocks, schedule if tokens.is_done else Schedule()
            self.tells.emit(
                events.StepFinished(
                    number=self.num_steps, num_sequences=len(computed.work), num_tokens=computed.num_tokens,
                    num_prefill_tokens=computed.num_prefill_tokens, num_sampled=tokens.num_sampled,
                    num_waiting=len(self._scheduler.waiting), num_running=len(self._scheduler.running),
                    preemptions=len(schedule.preempted), seconds=seconds, forward_seconds=forward,
                    sampling_seconds=tokens.seconds, blocks_used=blocks.num_used, blocks_total=blocks.num_blocks,
                    token_gaps=self._gaps, context_tokens=computed.context(self._scheduler.needs.windows),
                )
            )  # fmt: skip
